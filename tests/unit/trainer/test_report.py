"""Tests of the reported metrics of a batch."""

import pytest

from services.trainer.steps.report import derive
from tests.helpers.batches import spec_of

MEANS = {
    "reward_mean": 0.5,
    "reward_std": 0.5,
    "score_mean": 0.5,
    "is_weight_mean": 1.0,
    "is_weight_square": 1.0,
}


def test_a_batch_without_any_reward_has_no_mean_reward():
    scored = derive({**MEANS, "scored_fraction": 0.25}, spec_of())
    assert (scored["reward_mean"], scored["reward_std"]) == pytest.approx((0.5, 0.5))
    failed = derive(
        {**MEANS, "reward_mean": 0.0, "reward_std": 0.0, "scored_fraction": 0.0}, spec_of()
    )
    assert not {"reward_mean", "reward_std", "score_mean"} & failed.keys()


def test_metrics_by_staleness_are_of_tokens_that_exist():
    ages = {
        "tokens_by_staleness/0": 0.0,
        "tokens_by_staleness/1": 1.0,
        **{f"kl_rollout_by_staleness/{age}": 0.1 * age for age in (0, 1)},
        **{f"is_clipped_by_staleness/{age}": 0.2 * age for age in (0, 1)},
        **{f"is_weight_by_staleness/{age}": 1.0 * age for age in (0, 1)},
        **{f"is_weight_square_by_staleness/{age}": 1.25 * age for age in (0, 1)},
    }
    metrics = derive({**MEANS, "scored_fraction": 1.0, **ages}, spec_of())
    assert {name: value for name, value in metrics.items() if "_by_staleness/" in name} == {
        "tokens_by_staleness/1": 1.0,
        "kl_rollout_by_staleness/1": 0.1,
        "is_clipped_by_staleness/1": 0.2,
        "ess_by_staleness/1": pytest.approx(0.8),
    }
