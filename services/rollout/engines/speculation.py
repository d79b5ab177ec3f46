"""Speculative decoding: n-gram proposals, and a switch that measures whether proposals speed up decoding.

Imports no engine.
"""

from array import array
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import numpy as np

from services.common.runspec.rollout import SpeculationSpec
from services.rollout.engines.base import DraftTotals

_REMEMBERED = 16
"""Steps of each kind whose times are compared."""
_TRIALS = 4
"""Steps of each kind before the first decision."""
_PERIOD = 64
"""Steps after which the slower kind is measured again."""
_AGAIN = 2
"""Steps of such a measurement: 3 % of all steps, which bounds its cost."""


@dataclass(slots=True)
class _Measured:
    """Recent steps with one number of running requests."""

    plain_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """Seconds of steps without proposals."""
    drafted_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """Seconds of steps with proposals."""
    gained: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """Tokens per request of steps with proposals."""
    num_steps: int = 0

    @property
    def pays(self) -> bool:
        """True if steps with proposals make more tokens per second than steps without."""
        # A step that captures a graph or compiles a kernel takes many times as long, hence the medians.
        return fmean(self.gained) / median(self.drafted_s) > 1 / median(self.plain_s)


class SpeculationSwitch:
    """Decides by measurement whether proposals speed up decoding at the present number of running requests.

    Steps with and without proposals are timed for each number of running requests, in classes that are at
    most a third wide. The kind with more tokens per second is used; the other one is measured again in two of
    64 steps, because both times and acceptance change while a policy learns.
    """

    def __init__(self) -> None:
        self._measured: defaultdict[int, _Measured] = defaultdict(_Measured)

    def is_on(self, num_running: int) -> bool:
        """Returns True if the next step should have proposals."""
        measurement = self._measured[_class_of(num_running)]
        measurement.num_steps += 1
        if len(measurement.drafted_s) < _TRIALS:
            return True
        if len(measurement.plain_s) < _TRIALS:
            return False
        return measurement.pays != (measurement.num_steps % _PERIOD < _AGAIN)

    def record(
        self, num_running: int, *, num_tokens: int, has_drafts: bool, seconds: float
    ) -> None:
        """Adds a step.

        Args:
            num_tokens: Tokens that the step added to all responses.
            has_drafts: True if any request had proposed tokens.
        """
        measurement = self._measured[_class_of(num_running)]
        if has_drafts:
            measurement.drafted_s.append(seconds)
            measurement.gained.append(num_tokens / num_running)
        else:
            measurement.plain_s.append(seconds)


def _class_of(number: int) -> int:
    """Returns the highest ``2**k`` or ``3 * 2**k`` that is not above a number."""
    power = 1 << (number.bit_length() - 1)
    return power + power // 2 if number >= power + power // 2 > power else power


class NgramSpeculator:
    """Proposes for each request the tokens that followed an earlier occurrence of its last tokens.

    Prompt lookup decoding (Saxena 2023; Yang et al., arXiv:2304.04487).
    """

    def __init__(self, spec: SpeculationSpec) -> None:
        self.num_tokens = spec.tokens
        """Max tokens of a proposal."""
        self.totals = DraftTotals()
        """Proposals so far."""
        self._shortest, self._longest = spec.prompt_lookup_min, spec.prompt_lookup_max
        self._switch = SpeculationSwitch()

    def is_on(self, num_running: int) -> bool:
        """Returns True if tokens should be proposed with this number of running requests."""
        return self._switch.is_on(num_running)

    def propose(self, tokens: "array[int]", *, limit: int) -> Sequence[int]:
        """Returns at most ``limit`` tokens that may follow a sequence of int64 tokens."""
        return propose_ngram(
            np.frombuffer(tokens, np.int64),
            limit=min(limit, self.num_tokens),
            shortest=self._shortest,
            longest=self._longest,
        )

    def record(
        self, drafts: Sequence[Sequence[int]], counts: Sequence[int], seconds: float
    ) -> None:
        """Adds a step of all running requests.

        Args:
            drafts: Proposed tokens of each request.
            counts: Tokens that the step added to each response.
        """
        num_tokens = sum(map(len, drafts))
        if num_tokens:
            self.totals += DraftTotals(
                num_drafts=sum(1 for draft in drafts if draft),
                num_tokens=num_tokens,
                # The last token of a step is drawn, not proposed.
                num_accepted=sum(counts) - len(counts),
            )
        self._switch.record(
            len(counts), num_tokens=sum(counts), has_drafts=num_tokens > 0, seconds=seconds
        )


def propose_ngram(
    tokens: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    *,
    limit: int,
    shortest: int,
    longest: int,
) -> list[int]:
    """Returns the tokens after the latest of the longest earlier occurrences of a sequence's last tokens.

    An occurrence that overlaps the end continues with the proposed tokens, so that a proposal always has
    ``limit`` tokens, or none if nothing occurred before.

    Args:
        tokens: ``[L]`` int64, at least one.
        shortest: Min number of last tokens that must have occurred.
        longest: Max number of last tokens that are compared.
    """
    if limit < 1:
        return []
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1
    length = 1
    while length < longest and len(ends):
        earlier = ends[ends > length]
        earlier = earlier[tokens[earlier - length - 1] == tokens[len(tokens) - length - 1]]
        if not len(earlier):
            break
        ends, length = earlier, length + 1
    if length < shortest or not len(ends):
        return []
    start = int(ends[-1])
    proposed: list[int] = tokens[start : start + limit].tolist()
    period = len(tokens) - start
    while len(proposed) < limit:
        proposed.append(proposed[len(proposed) - period])
    return proposed


def num_equal(proposed: Sequence[int], tokens: Sequence[int]) -> int:
    """Returns the number of proposed tokens before the first one that differs from the drawn token."""
    count = 0
    for proposal, token in zip(proposed, tokens, strict=False):
        if proposal != token:
            break
        count += 1
    return count
