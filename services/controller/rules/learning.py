"""Finds out why steps train nothing, and whether the reward fell, from the metrics of steps. Pure."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from services.common.runspec.run import RunSpec

Histogram = dict[str, int]
"""Number of samples by inclusive upper bound of their bucket; empty buckets are left out."""

PREFIX = "reward/"
"""Prefix of reward terms among a step's metrics."""
DECODE_TIMES = ("decode_fixed_s", "decode_sample_s", "decode_max_samples")
"""Metrics of decode times, which rollouts report and steps record: see ``services/rollout/monitor.py``."""


def histogram(values: Iterable[int]) -> Histogram:
    """Counts non-negative integers in buckets with bounds 0, 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    counts: Counter[int] = Counter()
    for value, count in Counter(values).items():
        counts[bound_of(value)] += count
    return {str(bound): counts[bound] for bound in sorted(counts)}


def bound_of(value: int) -> int:
    """Returns the upper bound of a number's bucket."""
    if value < 3:
        return max(value, 0)
    power: int = 1 << (value - 1).bit_length()
    between = power * 3 // 4
    return between if value <= between else power


def term_means(terms: Iterable[str]) -> dict[str, float]:
    """Returns the mean of each term over the samples that have it.

    Args:
        terms: Tag ``terms`` of each sample: a JSON object of numbers.

    Returns:
        Means by ``reward/NAME``.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for text in terms:
        for name, value in json.loads(text).items():
            values[PREFIX + name].append(value)
    return {name: sum(numbers) / len(numbers) for name, numbers in sorted(values.items())}


PATIENCE = 3
"""Consecutive steps that train nothing before this is reported."""
Reason = Literal["AllFailed", "AllTruncated", "EqualRewards"]
_MAX_POINTS = 2000
"""Max number of steps in a history: longer ones are thinned out."""
_NUM_STRETCHES = 10
_MIN_STRETCH_STEPS = 3
_MIN_CHANGE = 0.2
"""Min relative change of another metric that is reported with a fall of the reward."""


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
    begin = f"{PATIENCE} consecutive steps trained nothing: "
    if failed == count:
        return NothingLearned(
            "AllFailed",
            f"{begin}the rewards of all responses failed; fix rollout.rewards (the logs of the rollouts "
            "have the errors)",
        )
    mean = sum(step.reward_sum for step in newest) / (count - failed)
    limit = f"rollout.max_response_tokens ({spec.rollout.max_response_tokens})"
    if truncated == count - failed:
        return NothingLearned(
            "AllTruncated",
            f"{begin}every response was truncated at {limit}, with a mean reward of {mean:.3g}; raise "
            "rollout.max_response_tokens",
        )
    also = f" {100 * truncated / count:.0f} % of the responses were truncated at {limit}."
    return NothingLearned(
        "EqualRewards",
        f"{begin}all responses to a prompt have the same reward (mean {mean:.3g}), so no advantage is "
        "nonzero; compare rollout.rewards with the samples, raise rollout.group_size, or use other prompts "
        f"(data.curriculum, algorithm.dynamic_sampling).{also if truncated else ''}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardDrop:
    """Fall of the mean reward from its best stretch of steps to the newest one."""

    before: float
    after: float
    first_step: int
    """First step of the best stretch."""
    last_step: int
    changes: dict[str, tuple[float, float]]
    """Other metrics that changed with it, largest relative change first: before and after."""
    message: str


class RewardHistory:
    """Mean reward, response length, entropy and reward terms of a run's steps."""

    def __init__(self) -> None:
        self._every = 1
        self._points: list[tuple[int, dict[str, float]]] = []

    @staticmethod
    def sampled_steps(newest: int) -> range:
        every = 1
        while newest // every > _MAX_POINTS:
            every *= 2
        return range(every, newest + 1, every)

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        if len(self._points) == _MAX_POINTS:
            self._every *= 2
            self._points = [point for point in self._points if point[0] % self._every == 0]
        if step % self._every == 0 and "reward_mean" in metrics:
            values = {
                name: float(value)
                for name, value in metrics.items()
                if name in ("reward_mean", "response_length_mean", "entropy")
                or name.startswith(PREFIX)
            }
            self._points.append((step, values))

    def drop(self) -> RewardDrop | None:
        """Returns how far the reward is below its best stretch; None if that is within the noise.

        A stretch is a tenth of the steps, at least three. A drop exceeds two standard errors of the
        difference, and a twentieth of the best mean.
        """
        size = max(len(self._points) // _NUM_STRETCHES, _MIN_STRETCH_STEPS)
        newest = len(self._points) - size
        if newest < size:
            return None
        rewards = [values["reward_mean"] for _, values in self._points]
        stretches = {b: rewards[b : b + size] for b in range(newest % size, newest + 1, size)}
        best = max(stretches, key=lambda begin: fmean(stretches[begin]))
        before, after = fmean(stretches[best]), fmean(stretches[newest])
        noise = math.sqrt((_variance(stretches[best]) + _variance(stretches[newest])) / size)
        if before - after <= max(2 * noise, abs(before) / 20):
            return None
        first, last = self._points[best][0], self._points[best + size - 1][0]
        changes = self._changes(slice(best, best + size), slice(newest, None))
        message = f"reward fell from {before:.3g} (steps {first} to {last}) to {after:.3g}"
        if changes:
            texts = (f"{name} from {old:.3g} to {new:.3g}" for name, (old, new) in changes.items())
            message += f"; with it {', '.join(texts)}"
        return RewardDrop(
            before=before,
            after=after,
            first_step=first,
            last_step=last,
            changes=changes,
            message=message,
        )

    def _changes(self, best: slice, newest: slice) -> dict[str, tuple[float, float]]:
        """Returns the three metrics that changed most between two stretches."""
        changes: list[tuple[float, str, float, float]] = []
        stretches = [[values for _, values in self._points[stretch]] for stretch in (best, newest)]
        for name in stretches[1][-1].keys() - {"reward_mean"}:
            columns = [[v[name] for v in values if name in v] for values in stretches]
            if all(columns):
                old, new = map(fmean, columns)
                change = abs(new - old) / max(abs(old), abs(new), 1e-9)
                if change > _MIN_CHANGE:
                    changes.append((change, name, old, new))
        return {name: (old, new) for _, name, old, new in sorted(changes, reverse=True)[:3]}


def _variance(values: Sequence[float]) -> float:
    mean = fmean(values)
    return fmean((value - mean) ** 2 for value in values)
