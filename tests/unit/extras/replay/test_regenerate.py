"""Tests that a replay of responses which cannot be regenerated is refused before any computation."""

from pathlib import Path

import pytest

from services.common.errors import DataLossError, FailedPreconditionError, InvalidArgumentError
from services.extras.replay.regenerate import wanted_responses
from tests.helpers.specs import spec_with

REWARDS = [{"name": "exact_match"}]


@pytest.mark.parametrize(
    "rollout",
    [
        {"engine": "vllm", "reproducible": "batch_invariant"},
        {"engine": "torch", "reproducible": True},
        {"engine": "torch"},
    ],
)
def test_a_run_without_the_batch_invariant_torch_engine(tmp_path: Path, rollout) -> None:
    spec = spec_with(rollout={"rewards": REWARDS, **rollout})
    with pytest.raises(FailedPreconditionError, match=r"rollout\.reproducible"):
        wanted_responses(tmp_path, spec, ["1"])


@pytest.mark.parametrize(
    ("name", "error"), [("first", InvalidArgumentError), ("3/g00000001", DataLossError)]
)
def test_a_step_that_is_no_number_or_not_recorded(tmp_path: Path, name: str, error) -> None:
    spec = spec_with(rollout={"rewards": REWARDS, "reproducible": "batch_invariant"})
    with pytest.raises(error, match=name.partition("/")[0]):
        wanted_responses(tmp_path, spec, [name])
