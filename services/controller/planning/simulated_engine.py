"""Simulated engine: every running sample gets tokens at the pace that the number of samples allows."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, TypeVar

from services.controller.rules.groups import Group

_Owner = TypeVar("_Owner")
# Ends that differ by less than a thousandth of a token count as simultaneous.
_SAME = 1e-3


@dataclass(slots=True)
class SimulatedEngine(Generic[_Owner]):
    """Simulates an engine that decodes samples of several owners.

    Samples in slots get their tokens in parallel, so it is enough to count the tokens that one
    sample would have got since the beginning: each ends when that count has grown by its length.
    """

    places: int
    step_seconds: Callable[[int], float]
    """Returns the seconds of one decode step, from the number of running samples."""
    begun: Callable[[_Owner], None]
    """Called with the owner of each sample that gets a slot."""
    is_open: bool = True
    """True if waiting samples may get slots."""
    num_groups: int = 0
    """Groups dispatched to it that are not finished."""
    idle_s: float = 0.0
    """Seconds without a running sample."""
    place_s: float = 0.0
    """Slot-seconds: the time of all used slots, added up."""
    stamp: int = 0
    """Counter of changes of the running samples: an end computed before a change is invalid."""
    _waiting: deque[tuple[_Owner, int]] = field(default_factory=deque)
    _running: list[tuple[float, int, _Owner]] = field(default_factory=list)
    _num_begun: int = 0
    _tokens: float = 0.0
    _debt_s: float = 0.0
    _now: float = 0.0
    _step_s: float = 0.0

    @property
    def num_running(self) -> int:
        """Number of samples in slots."""
        return len(self._running)

    def put(self, owner: _Owner, length: int) -> None:
        """Adds a sample that waits for a slot."""
        self._waiting.append((owner, length))

    def put_aside(self) -> list[tuple[_Owner, int]]:
        """Removes and returns all samples with their missing tokens; call :meth:`settle` before."""
        left = [(owner, max(1, round(end - self._tokens))) for end, _, owner in self._running]
        left += self._waiting
        self._running.clear()
        self._waiting.clear()
        self.stamp += 1
        return left

    def pause(self, seconds: float) -> None:
        """Decodes nothing for some seconds."""
        self._debt_s += seconds
        self.stamp += 1

    def settle(self, now: float) -> list[_Owner]:
        """Advances the time to ``now``; returns the owners of the samples that ended, one for each."""
        passed, self._now = now - self._now, now
        num_running = len(self._running)
        if not num_running:
            self.idle_s += passed
            self._debt_s = max(0.0, self._debt_s - passed)
            return []
        self.place_s += passed * num_running
        paid = min(self._debt_s, passed)
        self._debt_s -= paid
        self._tokens += (passed - paid) / self._step_s
        ended = []
        while self._running and self._running[0][0] <= self._tokens + _SAME:
            ended.append(heappop(self._running)[2])
        return ended

    def admit(self) -> None:
        """Gives free slots to waiting samples; call :meth:`settle` before."""
        while self.is_open and self._waiting and len(self._running) < self.places:
            owner, length = self._waiting.popleft()
            self._num_begun += 1
            self.begun(owner)
            heappush(self._running, (self._tokens + length, self._num_begun, owner))
        if self._running:
            self._step_s = self.step_seconds(len(self._running))
        self.stamp += 1

    def next_end(self) -> float | None:
        """Returns the time at which the next sample ends if nothing changes; None if none runs."""
        if not self._running:
            return None
        tokens = max(0.0, self._running[0][0] - self._tokens)
        return self._now + self._debt_s + tokens * self._step_s


@dataclass(slots=True)
class SimulatedGroup:
    """Group that is being generated."""

    group: Group
    lengths: tuple[int, ...]
    engines: tuple[int, ...]
    left: int
    version: int = -1
    """Version under which its first token was sampled."""

    @property
    def tokens(self) -> int:
        """Tokens of all its samples."""
        return sum(self.lengths)


@dataclass(slots=True)
class ParkedGroup:
    """Part of a group that a paused engine had, parked until another engine takes it."""

    made: SimulatedGroup
    engine: int
    tokens: list[int]
    """Missing tokens of its samples."""

    def go_on(self, engines: Sequence[SimulatedEngine[SimulatedGroup]], number: int) -> None:
        """Continues it on an engine; settle the engine before."""
        self.made.engines = tuple(number if n == self.engine else n for n in self.made.engines)
        engines[number].num_groups += 1
        for count in self.tokens:
            engines[number].put(self.made, count)


def put_aside(engines: Sequence[SimulatedEngine[SimulatedGroup]]) -> list[ParkedGroup]:
    """Parks all groups of some engines, oldest first; settle the engines before."""
    found: dict[tuple[int, int], ParkedGroup] = {}
    for number, engine in enumerate(engines):
        for made, tokens in engine.put_aside():
            key = made.group.sequence, number
            found.setdefault(key, ParkedGroup(made, number, [])).tokens.append(tokens)
        engine.num_groups = 0
    return [found[key] for key in sorted(found)]
