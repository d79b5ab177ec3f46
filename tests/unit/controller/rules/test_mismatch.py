"""Tests that quantized rollouts are ended if their policy diverges too far from the trainer's."""

import pytest

from services.common.runspec.loader import canonical_json, parse_spec
from services.controller.rules.mismatch import (
    PATIENCE,
    divergence,
    mismatch,
    without_quantization,
)
from tests.helpers.specs import spec_with

QUANTIZED = {"quantization": "fp8", "max_mismatch": 0.2}


def test_the_mean_of_the_newest_steps_decides() -> None:
    spec = spec_with(rollout=QUANTIZED)
    assert mismatch([0.9] * (PATIENCE - 1), spec) is None
    assert mismatch([0.9, *[0.19] * PATIENCE], spec) is None
    cause = mismatch([0.0, *[0.25] * PATIENCE], spec)
    assert cause is not None
    assert cause.kl == pytest.approx(0.25)
    assert "rollout.max_mismatch" in cause.message


@pytest.mark.parametrize("rollout", [{}, {"quantization": "fp8", "max_mismatch": None}])
def test_rollouts_in_the_trainers_precision_or_without_a_limit_stay(rollout) -> None:
    assert mismatch([9.0] * PATIENCE, spec_with(rollout=rollout)) is None


def test_the_freshest_tokens_count() -> None:
    step = {"kl_rollout": 0.5, "kl_rollout_by_staleness/2": 0.9, "kl_rollout_by_staleness/1": 0.1}
    assert divergence(step) == 0.1
    assert divergence({"kl_rollout": 0.5}) == 0.5
    assert divergence({"loss": 1.0}) is None


def test_the_correction_stays_and_the_specification_is_valid() -> None:
    spec = spec_with(rollout=QUANTIZED)
    ended = without_quantization(spec)
    assert not ended.rollout.is_quantized
    assert ended.correction == spec.correction == "decoupled"
    assert parse_spec(canonical_json(ended)) == ended
