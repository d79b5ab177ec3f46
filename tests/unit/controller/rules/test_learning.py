"""Steps that train nothing are reported with the cause and the key to change."""

import pytest

from services.controller.rules.learning import PATIENCE, nothing_learned, step_samples
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
    found = nothing_learned([LEARNED, *[step] * PATIENCE], SPEC)
    assert found.reason == reason
    assert all(word in found.message for word in words)


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
