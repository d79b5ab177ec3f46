"""Tests that commands of ``examples/seeds`` are valid, fit their GPUs and have their sources' values."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import PretrainedConfig, Qwen2Config, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig

from services.checks.start.memory import run_memory
from services.common.callables import load_callable
from services.common.runspec.keys import flat
from services.common.runspec.loader import load_spec, parse_spec
from services.common.runspec.rollout import REWARDS
from services.common.runspec.run import RunSpec
from services.common.runspec.worker_kinds import total_gpus
from services.extras.kubernetes.pod_rules import pod_problems
from tests.helpers.pages import ROOT, example

FOLDER = ROOT / "examples" / "seeds"
PAGE = (ROOT / "docs" / "seeds.md").read_text(encoding="utf-8")
SOURCES: dict[str, dict[str, Any]] = yaml.safe_load((FOLDER / "sources.yaml").read_text())
FILES = {
    source: sorted(path for path in FOLDER.glob("*.yaml") if path.stem.startswith(source))
    for source in SOURCES
}
SPECS = [(source, path) for source, paths in FILES.items() for path in paths]
COLUMNS = ("verl-2231", "dots-rl-4", "verl-recipe-58")
LABELS = {source: re.sub(r"-(\d+)$", r" #\1", source) for source in SOURCES}
LABELS["dots-rl-4"] = "dots.rl #4"
_SHAPES: dict[str, PretrainedConfig] = {
    "Qwen/Qwen2.5-3B-Instruct": Qwen2Config(
        vocab_size=151_936, hidden_size=2048, intermediate_size=11_008, num_hidden_layers=36,
        num_attention_heads=16, num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": Qwen2MoeConfig(
        vocab_size=151_936, hidden_size=2048, intermediate_size=5632, num_hidden_layers=24,
        num_attention_heads=16, num_key_value_heads=16, num_experts=60, num_experts_per_tok=4,
        moe_intermediate_size=1408, shared_expert_intermediate_size=5632, tie_word_embeddings=False,
    ),
    "Qwen/Qwen3-4B": Qwen3Config(
        vocab_size=151_936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
    "Qwen/Qwen3-30B-A3B": Qwen3MoeConfig(
        vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, tie_word_embeddings=False,
    ),
}  # fmt: skip


def rows(section: str) -> list[list[str]]:
    """Returns the cells of the table of a section of the page, without its head."""
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def shown(value: Any) -> str:
    return f"`{', '.join(value) if isinstance(value, list) else value}`"


def keys_of(cell: str) -> list[str]:
    """Returns the keys of a specification that a cell names."""
    return re.findall(r"`([a-z_]+(?:\.[a-zN_]+)*)`", cell.partition(": ")[0])


@pytest.mark.parametrize(("source", "path"), SPECS, ids=[path.stem for _, path in SPECS])
def test_a_command_of_a_source_is_valid_for_the_gpus_that_the_source_names(
    source: str, path: Path
) -> None:
    spec, gpus = load_spec(path), SOURCES[source]["gpus"]
    assert total_gpus(spec) == gpus
    assert [*pod_problems(spec)] == []
    gpu_bytes = int(SOURCES[source]["gpu_gb"] * 1e9)
    run_memory(spec, _SHAPES[spec.model.path], gpu_bytes=gpu_bytes, gpus=gpus).check()


def test_each_source_has_its_commands() -> None:
    assert {source: len(paths) for source, paths in FILES.items()} == {
        **dict.fromkeys(SOURCES, 1),
        "dots-rl-4": 3,
    }


def test_the_page_translates_every_key_of_every_source() -> None:
    table = {key.strip("`"): cells for key, *cells in rows("Keys")}
    for number, source in enumerate(COLUMNS):
        cells_by_key = {key: cells[number] for key, cells in table.items() if cells[number]}
        cells_by_key = {key: value for key, value in cells_by_key.items() if value != "see below"}
        assert cells_by_key == {key: shown(value) for key, value in SOURCES[source]["keys"].items()}
    facts = {(source, name): value for source, name, value, _ in rows("What the texts state")}
    assert facts == {
        (LABELS[source], name): shown(value)
        for source, content in SOURCES.items()
        for name, value in content["stated"].items()
    }


def test_the_page_shows_the_three_task_groups() -> None:
    examples = SOURCES["dots-rl-4"]["examples"]
    cells = [(tasks, ratios) for _, tasks, ratios, _ in rows("Task groups of dots.rl #4")]
    assert cells == [tuple(shown(value) for value in example.values()) for example in examples]
    for file, _, _, gpus in rows("Task groups of dots.rl #4"):
        (name,) = re.findall(r"\(../examples/seeds/(\S+)\)", file)
        placed = load_spec(FOLDER / name).topology.place()
        assert ", ".join(str(group.gpus) for group in placed.groups) == gpus


def test_every_translation_names_a_key_that_exists() -> None:
    existing = {key for _, path in SPECS for key in parents(load_spec(path))}
    for key, *_, translation in rows("Keys"):
        assert translation.startswith(("none:", "`")), key
        if not translation.startswith("none:"):
            assert keys_of(translation), key
            for name in keys_of(translation):
                assert name in existing, (key, name)


def parents(spec: RunSpec) -> set[str]:
    """Returns the keys of a specification, and the groups that hold them."""
    whole = dict(flat(spec.model_dump(mode="json")))
    parts = [key.split(".") for key in whole]
    return {".".join(key[: number + 1]) for key in parts for number in range(len(key))}


def test_a_key_without_further_words_has_the_value_of_its_source() -> None:
    checked = 0
    for key, *values, translation in rows("Keys"):
        if not re.fullmatch(r"`[a-z_.]+`(;.*)?", translation) or "engine" in translation:
            continue
        name = keys_of(translation)[0]
        for source, value in zip(COLUMNS, values, strict=True):
            if not value or (";" in translation and source == "verl-recipe-58"):
                continue
            expected = SOURCES[source]["keys"][key.strip("`")]
            for path in FILES[source]:
                assert dict(flat(load_spec(path).model_dump(mode="json")))[name] == expected, path
                checked += 1
    assert checked > 60


@pytest.mark.parametrize(("source", "path"), SPECS, ids=[path.stem for _, path in SPECS])
def test_what_a_source_does_not_set_has_the_default_of_verl(source: str, path: Path) -> None:
    spec, keys = load_spec(path), SOURCES[source]["keys"]
    actor = "actor_rollout_ref.actor"
    assert spec.algorithm.clip_low == keys.get(f"{actor}.clip_ratio_low", 0.2)
    assert spec.algorithm.clip_high == keys.get(f"{actor}.clip_ratio_high", 0.2)
    assert spec.algorithm.dual_clip == keys.get(f"{actor}.clip_ratio_c", 3.0)
    optimizer = spec.trainer.optimizer
    assert optimizer.weight_decay == keys.get(f"{actor}.optim.weight_decay", 0.01)
    assert optimizer.betas == (0.9, 0.999)
    assert optimizer.max_grad_norm == keys.get(f"{actor}.grad_clip", 1.0)
    if spec.data.heldout is not None:
        assert spec.validation.before_train is keys.get("trainer.val_before_train", True)


@pytest.mark.parametrize("number", range(3))
def test_the_spelling_of_dots_rl_gives_the_same_groups(number: int) -> None:
    path = FOLDER / ("dots-rl-4-separate.yaml", "dots-rl-4-logp-shared.yaml",
                     "dots-rl-4-scoring-shared.yaml")[number]  # fmt: skip
    document, source = yaml.safe_load(path.read_text()), SOURCES["dots-rl-4"]
    for name in ("task_groups", "ratios", "granularity"):
        del document["topology"][name]
    for key, value in source["examples"][number].items():
        document["trainer"][key.rpartition(".")[2]] = yaml.safe_load(value)
    del document["algorithm"]["max_staleness"]
    document["trainer"]["generate_ahead_steps"] = source["keys"]["+trainer.generate_ahead_steps"]
    spec, expected = parse_spec(document), load_spec(path)
    assert (spec.topology, spec.algorithm) == (expected.topology, expected.algorithm)


@pytest.mark.parametrize("name", [*[path.stem for _, path in SPECS], "from-verl"])
def test_a_reasoned_answer_of_a_verl_data_set_is_right(name: str, tmp_path: Path) -> None:
    page = name == "from-verl"
    spec = load_spec(
        example("coming-from.md", f"{name}.yaml", tmp_path) if page else FOLDER / f"{name}.yaml"
    )
    (reward,) = spec.rollout.rewards
    score = load_callable(REWARDS.get(reward.name, reward.name))
    for response, expected in (
        ("She sold 48 + 24 = 72 clips.\n#### 72", 1.0),
        ("She sold 48 + 24 = 71 clips.\n#### 71", 0.0),
        ("48 + 24 is \\boxed{72}.", 1.0),
    ):
        assert score("How many?", response, "72", {}) == expected
