"""Tests that steps without a learning signal are reported with their cause and the key to change."""

import pytest

from services.controller.rules.learning import (
    PATIENCE,
    RewardHistory,
    nothing_learned,
    step_samples,
)
from tests.helpers.specs import spec_with

SPEC = spec_with(rollout={"max_response_tokens": 32})


def idle(*ends, reward=0.0):
    return step_samples([reward] * len(ends), ends, is_idle=True)


LEARNED = step_samples([0.0, 1.0], ["stop", "stop"], is_idle=False)
EQUAL, CUT, FAILED = idle("stop", "length"), idle("length", "length"), idle("failed", "failed")


@pytest.mark.parametrize(
    ("step", "reason", "words"),
    [
        (EQUAL, "EqualRewards", ("rollout.rewards", "rollout.group_size", "50 %")),
        (idle("stop", "stop", reward=1.0), "EqualRewards", ("mean 1",)),
        (CUT, "AllTruncated", ("rollout.max_response_tokens (32)", "raise")),
        (idle("length", "failed"), "AllTruncated", ("rollout.max_response_tokens",)),
        (FAILED, "AllFailed", ("rollout.rewards",)),
    ],
)
def test_the_cause_is_named_with_its_key(step, reason, words):
    cause = nothing_learned([LEARNED, *[step] * PATIENCE], SPEC)
    assert cause.reason == reason
    assert all(word in cause.message for word in words)


def test_fewer_steps_or_one_that_learned_are_no_cause():
    assert nothing_learned([CUT] * (PATIENCE - 1), SPEC) is None
    assert nothing_learned([CUT, LEARNED, CUT], SPEC) is None
    assert nothing_learned([LEARNED, *[CUT] * (PATIENCE - 1)], SPEC) is None


@pytest.mark.parametrize(
    "parts",
    [
        {"algorithm": {"advantage": "uniform"}},
        {"algorithm": {"loss": "sft"}, "rollout": {"rewards": []}},
        {"teacher": {"path": "tiny:qwen2-0.4m"}},
    ],
)
def test_training_that_does_not_depend_on_rewards_is_not_judged_by_them(parts):
    assert nothing_learned([EQUAL] * PATIENCE, spec_with(**parts)) is None


@pytest.mark.parametrize(
    ("rewards", "fell"),
    [
        ([min(1.0, step / 10) for step in range(15)] + [0.9, 0.6, 0.3, 0.1, 0.0], True),
        ([1.0] * 12 + [0.0] * 8, True),
        ([0.1, 0.2, 0.6, 0.9, 1.0, 1.0, 0.9, 0.95], False),
        ([0.5] * 20, False),
        ([0.5, 0.52, 0.47, 0.5, 0.51, 0.49, 0.53, 0.5, 0.46, 0.5, 0.51, 0.48], False),
        ([0.0] * 6 + [0.03] + [0.0] * 20, False),
        ([1.0, 0.0], False),
        ([], False),
    ],
)
def test_a_drop_of_the_reward_is_distinguished_from_noise(rewards, fell):
    history = RewardHistory()
    for step, reward in enumerate(rewards, start=1):
        history.add(step, {"reward_mean": reward})
    assert (history.drop() is not None) is fell


def test_a_drop_names_its_steps_and_the_metrics_that_changed_with_it():
    history = RewardHistory()
    for step in range(1, 41):
        rises = step <= 30
        history.add(
            step,
            {"reward_mean": float(rises), "entropy": 1.0 if rises else 0.1, "reward/style": 0.5},
        )
    drop = history.drop()
    assert (drop.before, drop.after) == (1.0, 0.0)
    assert drop.last_step <= 30
    assert drop.changes == {"entropy": (1.0, pytest.approx(0.1))}


def test_a_long_history_is_thinned_to_the_steps_that_a_restart_reads():
    history, again = RewardHistory(), RewardHistory()
    for step in range(1, 10_001):
        history.add(step, {"reward_mean": float(step < 9_000)})
    for step in RewardHistory.sampled_steps(10_000):
        again.add(step, {"reward_mean": float(step < 9_000)})
    assert history.drop() == again.drop()
    assert history.drop().before == 1.0
