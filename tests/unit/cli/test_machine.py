"""What this machine has for a run is told before the start."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from services.cli.machine import lacks, shared_gpus, slow_settings
from services.cli.preflight import read_checked
from services.common.spec.run import RunSpec, default_places
from tests.helpers.specs import spec_with


def spec(**topology: str) -> RunSpec:
    return spec_with(topology=topology, trainer={"prompts_per_step": 8})


@pytest.mark.parametrize(
    ("gpus", "told"),
    [
        ("0", "3 workers share the 1 GPU(s)"),
        ("0,1", "3 workers share the 2"),
        ("0,1,2", ""),
        ("", ""),
    ],
)
def test_workers_that_share_gpus_are_told_of(
    monkeypatch: pytest.MonkeyPatch, gpus: str, told: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    found = shared_gpus(spec())
    assert found.startswith(told)
    assert bool(found) == bool(told)
    assert ("rollout.replicas is 2" in found) == bool(told)


@pytest.mark.parametrize(
    ("gpus", "told"), [("0", "needs 2 GPUs, but this machine has 1"), ("0,1", "")]
)
def test_gpus_of_their_own_are_not_shared_in_a_mixed_run(
    monkeypatch: pytest.MonkeyPatch, gpus: str, told: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setenv("CC", sys.executable)
    found = " ".join(lacks(spec(placement="mixed")))
    assert told in found
    assert bool(found) == bool(told)


@pytest.mark.parametrize(
    ("gpus", "given", "replicas"),
    [("0", {}, 1), ("0,1", {}, 1), ("0,1,2", {}, 2), ("", {}, 2), ("0", {"replicas": 2}, 2)],
)
def test_a_run_that_does_not_say_how_many_rollouts_has_no_more_than_there_are_gpus_for(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    gpus: str,
    given: dict[str, Any],
    replicas: int,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    data, file = tmp_path / "data.jsonl", tmp_path / "run.yaml"
    data.write_text(json.dumps({"prompt": "1+1", "answer": "2"}) + "\n")
    document = spec().model_dump(mode="json", exclude_unset=True)
    document["data"]["train"]["path"] = str(data)
    document["rollout"] = {"rewards": document["rollout"]["rewards"], **given}
    document["validation"] = {"every": 0}
    file.write_text(json.dumps(document))
    draft = read_checked(file)
    found = draft.examined.spec
    assert found is not None
    assert found.rollout.replicas == replicas
    # What follows from it follows: one rollout has the places of both.
    assert found.rollout.max_running_samples == default_places(
        found, max_staleness=found.algorithm.max_staleness, replicas=replicas
    )
    assert any("rollout.replicas" in note for note in draft.notes) == (
        not given and gpus in {"0", "0,1"}
    )


def test_gpus_need_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert "kernels for GPUs need a C compiler" in " ".join(lacks(spec()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not list(lacks(spec()))


@pytest.mark.parametrize(
    ("path", "trainer", "gpus", "told"),
    [
        ("org/model", {}, "0", "bfloat16 takes a fraction of the time of float32; trainer.compile"),
        ("org/model", {"dtype": "bfloat16"}, "0", "on GPUs trainer.compile: true"),
        ("org/model", {"dtype": "bfloat16", "compile": True}, "0", ""),
        ("org/model", {}, "", ""),
        ("tiny:qwen2-0.4m", {}, "0", ""),
    ],
)
def test_what_gpus_are_fast_at_is_told(
    monkeypatch: pytest.MonkeyPatch, path: str, trainer: dict[str, Any], gpus: str, told: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    document = spec().model_dump(exclude_unset=True)
    document["model"]["path"] = path
    document["trainer"] |= trainer
    found = slow_settings(RunSpec.model_validate(document))
    assert told in found
    assert bool(found) == bool(told)
