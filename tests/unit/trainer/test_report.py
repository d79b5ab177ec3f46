"""Reported metrics of a batch."""

import pytest

from services.trainer.steps.report import derive
from tests.helpers.batches import spec_of

MEANS = {
    "reward_mean": 0.5,
    "reward_square": 0.5,
    "score_mean": 0.5,
    "is_weight_mean": 1.0,
    "is_weight_square": 1.0,
}


def test_a_batch_without_any_reward_has_no_mean_reward():
    scored = derive({**MEANS, "scored_fraction": 0.25}, spec_of())
    assert (scored["reward_mean"], scored["reward_std"]) == pytest.approx((0.5, 0.5))
    failed = derive(
        {**MEANS, "reward_mean": 0.0, "reward_square": 0.0, "scored_fraction": 0.0}, spec_of()
    )
    assert not {"reward_mean", "reward_std", "score_mean"} & failed.keys()
