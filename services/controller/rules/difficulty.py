"""Tracks how hard each prompt is for the policy, and filters groups that train nothing. Pure.

A prompt whose samples are all right, or all wrong, trains nothing, so it is skipped. It is retried after some
steps, because the policy changes. Memory is ten bytes per prompt, regardless of the length of the run.
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Final, NamedTuple

from services.common.runspec.algorithm import AlgorithmSpec, OverlongSpec
from services.common.runspec.data import CurriculumSpec
from services.common.runspec.formulas import IdleGroups

SOLVED: Final = "solved"
HOPELESS: Final = "hopeless"
_MAX_TRIES = 2**16 - 1
# Size of a sum of advantages, each about 1, that counts as rounding.
_ROUNDING = 1e-12


class PromptRate(NamedTuple):
    """Stored success rate of one prompt."""

    row: int
    rate: float
    """Exponentially weighted mean of its groups' mean rewards."""
    tries: int
    """Number of groups in the mean."""
    until: int
    """Step before which the prompt is skipped; 0 if it is not skipped."""


@dataclass(frozen=True, slots=True)
class _Skipped:
    until: int
    why: str


class Difficulty:
    """Success rates of all prompts of a run, and which prompts are skipped.

    Args:
        spec: Thresholds, and number of steps for which prompts are skipped.
        known: Rates that an earlier controller recorded.
    """

    def __init__(
        self, num_rows: int, spec: CurriculumSpec, *, rates: Iterable[PromptRate] = ()
    ) -> None:
        self._spec = spec
        self._rates = array("f", bytes(4 * num_rows))
        self._tries = array("H", bytes(2 * num_rows))
        self._until = array("i", bytes(4 * num_rows))
        self._skipped: Counter[_Skipped] = Counter()
        self._changed: set[int] = set()
        for rate in rates:
            if rate.row < num_rows:
                self._put(rate)

    def observe(self, row: int, rewards: Sequence[float], *, step: int) -> None:
        """Updates a prompt's rate with a finished group; a group without finite rewards is ignored.

        Args:
            step: Step whose weights are served; -1 before the first.
        """
        reward = sum(rewards) / len(rewards) if rewards else math.nan
        if not math.isfinite(reward):
            return
        tries = self._tries[row]
        share = self._spec.newest_share if tries else 1.0
        rate = (1 - share) * self._rates[row] + share * reward
        tries = min(tries + 1, _MAX_TRIES)
        is_skipped = tries >= self._spec.min_tries and self._why(rate) is not None
        until = max(step, 0) + self._spec.retry_after_steps if is_skipped else 0
        self._put(PromptRate(row, rate, tries, until))
        self._changed.add(row)

    def rate_of(self, row: int) -> PromptRate:
        return PromptRate(row, self._rates[row], self._tries[row], self._until[row])

    def is_skipped(self, row: int, *, step: int) -> bool:
        """Returns True if a prompt is left out while the weights of ``step`` are served."""
        return self._until[row] > step

    def count_skipped(self, *, step: int) -> dict[str, int]:
        """Returns the number of prompts that are left out, by reason."""
        for skip in [skipped for skipped in self._skipped if skipped.until <= step]:
            del self._skipped[skip]
        counts = {SOLVED: 0, HOPELESS: 0}
        for skipped, count in self._skipped.items():
            counts[skipped.why] += count
        return counts

    def take_changes(self) -> tuple[PromptRate, ...]:
        """Returns the records that changed since the last call."""
        rates = tuple(self.rate_of(row) for row in sorted(self._changed))
        self._changed.clear()
        return rates

    def _put(self, rate: PromptRate) -> None:
        row = rate.row
        before = _Skipped(self._until[row], self._why(self._rates[row]) or "")
        if self._skipped[before] > 1:
            self._skipped[before] -= 1
        else:
            del self._skipped[before]
        self._rates[row], self._tries[row], self._until[row] = rate.rate, rate.tries, rate.until
        if rate.until:
            self._skipped[_Skipped(rate.until, self._why(self._rates[row]) or SOLVED)] += 1

    def _why(self, rate: float) -> str | None:
        """Returns why a prompt with this rate is skipped; None if it is not skipped."""
        spec = self._spec
        if spec.solved_from is not None and rate >= spec.solved_from:
            return SOLVED
        if spec.hopeless_to is not None and rate <= spec.hopeless_to:
            return HOPELESS
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A member of a group that counts in the group's statistics."""

    reward: float
    num_tokens: int = 0
    """Length of the response; only a penalty for long responses needs it."""
    is_truncated: bool = False
    """True if the response reached its limit."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Terms of the reward by name; only advantages of single terms need them."""


def trains_nothing(
    members: Sequence[Member], algorithm: AlgorithmSpec, *, max_response_tokens: int
) -> bool:
    """Returns True if every token of the group that trains has an advantage of 0.

    Returns False if the advantages do not follow from the group's scores alone.

    Args:
        members: Members of one group, not empty.
        max_response_tokens: Limit of the length, from which long responses are penalized.
    """
    kind = algorithm.advantage_kind.idle_groups
    if kind is None:
        return False
    masks_truncated = algorithm.overlong.mask_truncated
    trained = [not (masks_truncated and member.is_truncated) for member in members]
    if kind == "equal_terms":
        weights = algorithm.arguments_of_advantage["weights"]
        return not _have_advantages_of_terms(members, weights, trained)
    scores = [
        reward + _penalty(member, algorithm.overlong, max_response_tokens)
        for reward, member in zip(_stored(members), members, strict=True)
    ]
    if len(members) == 1 and not algorithm.advantage_kind.compares_members:
        return not (trained[0] and scores[0])  # the baseline of a group of one is 0
    return not _have_advantages(kind, scores, trained)


def _stored(members: Sequence[Member]) -> Sequence[float]:
    """Returns the rewards in the precision in which the trainer receives them."""
    return array("f", (member.reward for member in members))


def _penalty(member: Member, overlong: OverlongSpec, max_tokens: int) -> float:
    """Returns DAPO's penalty for a long response, as :func:`advantages.overlong_penalty` computes it."""
    if not overlong.buffer_tokens:
        return 0.0
    over = (member.num_tokens - (max_tokens - overlong.buffer_tokens)) / overlong.buffer_tokens
    return -min(max(over, 0.0), 1.0) * overlong.penalty


def _have_advantages_of_terms(
    members: Sequence[Member], weights: Mapping[str, float], trained: Sequence[bool]
) -> bool:
    """Returns True if the terms give a member that trains an advantage; those of two terms may cancel."""
    names = [name for name, weight in weights.items() if weight]
    if any(name not in member.terms for name in names for member in members):
        return True  # the trainer reports missing terms
    totals = [0.0] * len(members)
    for name in names:
        values = [member.terms[name] for member in members]
        mean, deviation = fmean(values), pstdev(values) or 1.0
        parts = [weights[name] * (value - mean) / deviation for value in values]
        totals = [total + part for total, part in zip(totals, parts, strict=True)]
    pairs = zip(totals, trained, strict=True)
    return any(is_trained and abs(total) > _ROUNDING for total, is_trained in pairs)


def _have_advantages(kind: IdleGroups, scores: Sequence[float], trained: Sequence[bool]) -> bool:
    """Returns True if a member that trains has an advantage, which follows from the scores of all."""
    if kind == "no_single_best":
        best = max(scores)
        return len(scores) > 1 and scores.count(best) == 1 and trained[scores.index(best)]
    if kind == "no_success" and sum(scores) <= 0:
        return False
    return any(trained) and min(scores) < max(scores)
