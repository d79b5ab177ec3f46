"""Finds out why steps train nothing, from the rewards of their samples. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from services.common.runspec.run import RunSpec

PATIENCE = 3
"""Consecutive steps that train nothing before this is reported."""
Reason = Literal["AllFailed", "AllTruncated", "EqualRewards"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """Outcome of the samples of one step."""

    is_idle: bool
    """True if no token of the step has an advantage."""
    count: int
    failed: int
    """Samples without a score."""
    truncated: int
    """Samples that reached ``rollout.max_response_tokens``, or the end of the model's context."""
    reward_sum: float


@dataclass(frozen=True, slots=True)
class NothingLearned:
    """Why the newest steps trained nothing, and what to change."""

    reason: Reason
    message: str


def step_samples(
    rewards: Sequence[float], finish_reasons: Sequence[str], *, is_idle: bool
) -> StepSamples:
    """Counts the sample outcomes of a step.

    Args:
        rewards: Reward of each sample; rewards of failed samples are ignored.
        finish_reasons: How each sample ended: ``stop``, ``length`` or ``failed``.
        is_idle: Whether no token of the step has an advantage.
    """
    ends = list(finish_reasons)
    scored = [
        reward for reward, end in zip(rewards, finish_reasons, strict=True) if end != "failed"
    ]
    return StepSamples(
        is_idle=is_idle,
        count=len(ends),
        failed=ends.count("failed"),
        truncated=ends.count("length"),
        reward_sum=sum(scored),
    )


def nothing_learned(steps: Sequence[StepSamples], spec: RunSpec) -> NothingLearned | None:
    """Returns why the newest :data:`PATIENCE` steps trained nothing; None if one of them did.

    Args:
        steps: Steps of the run, in order.
        spec: Specification of the run; the result is None if training does not depend on rewards.
    """
    newest = steps[-PATIENCE:]
    depends = spec.is_rewarded and spec.algorithm.advantage not in ("none", "uniform")
    if not depends or len(newest) < PATIENCE or not all(step.is_idle for step in newest):
        return None
    count = sum(step.count for step in newest)
    failed, truncated = (sum(getattr(s, name) for s in newest) for name in ("failed", "truncated"))
    begin = f"{PATIENCE} steps in a row trained nothing: "
    if failed == count:
        return NothingLearned(
            "AllFailed",
            f"{begin}the rewards of all responses failed; mend rollout.rewards, whose errors are in the "
            "logs of the rollouts",
        )
    mean = sum(step.reward_sum for step in newest) / (count - failed)
    limit = f"rollout.max_response_tokens ({spec.rollout.max_response_tokens})"
    if truncated == count - failed:
        return NothingLearned(
            "AllTruncated",
            f"{begin}every response was cut off at {limit}, with a mean reward of {mean:.3g}; raise "
            "rollout.max_response_tokens",
        )
    also = f" {100 * truncated / count:.0f} % of the responses were cut off at {limit}."
    return NothingLearned(
        "EqualRewards",
        f"{begin}all responses to a prompt got the same reward (mean {mean:.3g}), so none has an advantage; "
        "check rollout.rewards against the samples, raise rollout.group_size, or choose other prompts "
        f"(data.curriculum, algorithm.dynamic_sampling).{also if truncated else ''}",
    )
