"""What this machine has for a run is told before the start."""

import pytest

from services.cli.machine import lacks, shared_gpus
from services.common.spec.run import RunSpec


def spec(**topology: str) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "few",
            "model": {"path": "tiny:qwen2-0.4m"},
            "data": {"train": {"source": "jsonl", "path": "none"}},
            "rollout": {"rewards": [{"name": "exact_match"}]},
            "trainer": {"steps": 1, "prompts_per_step": 8},
            "topology": topology,
        }
    )


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
    found = " ".join(lacks(spec(placement="mixed")))
    assert told in found
    assert bool(found) == bool(told)
