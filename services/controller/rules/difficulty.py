"""Tracks how hard each prompt is for the policy, from the rewards of its groups. Pure.

A prompt whose samples are all right, or all wrong, trains nothing, so it is skipped. It is retried
after some steps, because the policy changes. Memory is ten bytes per prompt, regardless of the length
of the run.
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from services.common.runspec.data import CurriculumSpec

SOLVED: Final = "solved"
HOPELESS: Final = "hopeless"
_MAX_TRIES = 2**16 - 1


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
        self, num_rows: int, spec: CurriculumSpec, *, known: Iterable[PromptRate] = ()
    ) -> None:
        self._spec = spec
        self._rates = array("f", bytes(4 * num_rows))
        self._tries = array("H", bytes(2 * num_rows))
        self._until = array("i", bytes(4 * num_rows))
        self._skipped: Counter[_Skipped] = Counter()
        self._changed: set[int] = set()
        for rate in known:
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
        for passed in [skipped for skipped in self._skipped if skipped.until <= step]:
            del self._skipped[passed]
        counts = {SOLVED: 0, HOPELESS: 0}
        for skipped, count in self._skipped.items():
            counts[skipped.why] += count
        return counts

    def take_changes(self) -> tuple[PromptRate, ...]:
        """Returns the records that changed since the last call."""
        changed = tuple(self.rate_of(row) for row in sorted(self._changed))
        self._changed.clear()
        return changed

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
