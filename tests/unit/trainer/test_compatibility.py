"""Tests that checkpoints of another model are refused by key, before workers start and when they load."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import DataLossError
from services.common.models.loading import load_config
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.loader import SpecError, parse_spec
from services.common.runspec.run import RunSpec
from services.trainer import __main__ as trainer
from services.trainer.checkpoint import compatibility, manifest
from services.trainer.settings import TrainerSettings
from tests.helpers.batches import policy_of, random_queue, rank_of, spec_of
from tests.helpers.preflight import check
from tests.helpers.specs import changed

MUON = {"kind": "muon", "learning_rate": 1e-3}
SEEING = {"model": {"path": "tiny:qwen2_5_vl-0.6m", "tokenizer": "chars:abcd", "images": True}}
LORA = {"rank": 4, "target_modules": ["q_proj"]}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def spec_with(folder: Path, **changes: Any) -> RunSpec:
    data = folder / "prompts.jsonl"
    data.write_text(4 * '{"prompt": "a", "answer": "b"}\n')
    return parse_spec(changed(data={"train": {"source": "jsonl", "path": str(data)}}, **changes))


def facts_of(spec: RunSpec) -> dict[str, Any]:
    tokenizer = load_tokenizer(spec.model)
    return compatibility.model_facts(spec, load_config(spec.model, tokenizer), tokenizer)


def checkpoint_of(root: Path, spec: RunSpec, **facts: Any) -> Path:
    manifest.unfinished_of(root, 3).mkdir(parents=True)
    facts = {"num_updates": 3, "model": facts_of(spec), **facts}
    return manifest.publish(root, 3, facts, keep=2)


GIVEN: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {}, ""),
    ({"model": {"path": "tiny:qwen2-1.2m"}}, {}, "model.path"),
    (
        {"model": {"tokenizer": "chars:abcd"}},
        {"model": {"tokenizer": "chars:abce"}},
        "model.tokenizer",
    ),
    ({"model": {"tokenizer": "chars:abcd"}}, {}, "vocab_size"),
    ({"trainer": {"lora": LORA}}, {}, "trainer.lora"),
    ({}, {"trainer": {"lora": LORA}}, "trainer.lora"),
    ({"trainer": {"lora": LORA}}, {"trainer": {"lora": {**LORA, "rank": 8}}}, "trainer.lora"),
    (
        {"trainer": {"lora": LORA}, "model": {"revision": "v1"}},
        {"trainer": {"lora": LORA}, "model": {"revision": "v2"}},
        "model.revision",
    ),
    ({"trainer": {"lora": {**LORA, "sync": "merged"}}}, {"trainer": {"lora": LORA}}, ""),
    ({"trainer": {"lora": {}}}, {"trainer": {"lora": {"target_modules": LINEAR}}}, ""),
    (
        {"trainer": {"lora": {}}},
        {"trainer": {"lora": {"target_modules": ["q_proj"]}}},
        "trainer.lora",
    ),
    ({"model": {"revision": "v1"}}, {"model": {"revision": "v2"}}, ""),
    ({}, {"algorithm": {"advantage": "gae"}}, "algorithm.advantage"),
    ({}, {"trainer": {"steps": 3}}, "trainer.steps"),
    ({}, {"trainer": {"optimizer": MUON}}, "trainer.optimizer.kind"),
    ({"trainer": {"optimizer": MUON}}, {}, "trainer.optimizer.kind"),
    ({"algorithm": "reward_model", "rollout": {"rewards": []}}, {}, "algorithm.loss"),
    (SEEING, {**SEEING, "trainer": {"freeze_vision_tower": False}}, "trainer.freeze_vision_tower"),
]


@pytest.mark.parametrize(("saved", "changes", "key"), GIVEN)
def test_a_checkpoint_of_another_model_is_refused_before_workers_start(
    tmp_path: Path, saved: dict[str, Any], changes: dict[str, Any], key: str
) -> None:
    folder = checkpoint_of(tmp_path / "saved", spec_with(tmp_path, **saved))
    trainer = {"steps": 4, **changes.get("trainer", {}), "checkpoint": {"start_from": str(folder)}}
    try:
        check(spec_with(tmp_path, **{**changes, "trainer": trainer}))
        problems = []
    except SpecError as error:
        problems = [problem for problem in error.problems if "start_from" in problem]
    assert len(problems) == bool(key), problems
    assert all(key in problem for problem in problems)


def test_a_model_that_cannot_be_built_is_reported_without_its_checkpoint(tmp_path: Path) -> None:
    saved = checkpoint_of(tmp_path / "saved", spec_with(tmp_path, trainer={"lora": {}}))
    folder = tmp_path / "model"
    policy_of(spec_of()).model.save_pretrained(folder)
    load_tokenizer(spec_of().model).save(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "none"}))
    trainer = {"steps": 4, "lora": {}, "checkpoint": {"start_from": str(saved)}}
    spec = spec_with(tmp_path, model={"path": str(folder), "tokenizer": None}, trainer=trainer)
    with pytest.raises(SpecError) as caught:
        check(spec)
    (problem,) = caught.value.problems
    assert problem.startswith("model.path")


def test_adapters_continue_only_on_the_base_that_they_were_trained_on(tmp_path: Path) -> None:
    model_facts = facts_of(spec_with(tmp_path, trainer={"lora": LORA}))
    model_facts["lora"] |= {"base_dtype": "nf4"}

    def problems(saved: Any) -> list[str]:
        facts = {"num_updates": 1, "model": {**model_facts, "lora": saved}}
        return [*compatibility.mismatches(facts, model_facts, parts=("",))]

    assert not problems(model_facts["lora"])
    (problem,) = problems({**model_facts["lora"], "base_dtype": "int8"})
    assert "in int8" in problem
    assert "in nf4" in problem
    # Earlier releases recorded neither the data type nor the revision of the base.
    former = {key: model_facts["lora"][key] for key in ("rank", "alpha", "target_modules", "base")}
    assert not problems(former)
    assert problems({**former, "rank": 8})


def test_workers_refuse_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    spec = spec_of()
    policy = policy_of(spec)
    rank = rank_of(spec, policy, random_queue(policy), root=tmp_path)
    rank.checkpointer._model = facts_of(spec)
    folder = rank.checkpointer.write(rank.snapshot(3))
    assert rank.restore(folder) == 3
    rank.checkpointer._model = {**facts_of(spec), "tokens": "other"}
    with pytest.raises(compatibility.OtherCheckpointError, match=r"model\.tokenizer"):
        rank.restore(folder)


@pytest.mark.parametrize("kind", [compatibility.OtherCheckpointError, DataLossError])
def test_a_trainer_ends_with_the_reason_why_it_cannot_load_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fail(settings: TrainerSettings) -> None:
        raise ExceptionGroup("tasks", [kind("checkpoint x cannot be loaded")])

    settings = TrainerSettings(
        controller_address="unused", run_id="run", worker_id="trainer-0", device="cpu"
    )
    monkeypatch.setattr(trainer, "TrainerSettings", lambda: settings)
    monkeypatch.setattr(trainer, "configure", lambda **_: None)
    monkeypatch.setattr(trainer, "_work", fail)
    with pytest.raises(SystemExit) as ended:
        trainer.main()
    assert ended.value.code == "checkpoint x cannot be loaded"
