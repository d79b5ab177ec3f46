"""An engine as numbers: every running sample gets tokens at the pace that their number allows."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, TypeVar

from services.controller.rules.groups import Group

_Owner = TypeVar("_Owner")
# Ends that differ by less than a thousandth of a token are one.
_SAME = 1e-3


@dataclass(slots=True)
class SimulatedEngine(Generic[_Owner]):
    """Decodes samples of whoever owns them.

    Samples that have a place get their tokens side by side, so it is enough to count the tokens that one of
    them would have got since the beginning: each ends when that count has grown by its length.
    """

    places: int
    step_seconds: Callable[[int], float]
    """One decode step, from the number of running samples."""
    begun: Callable[[_Owner], None]
    """Hears of each sample that gets a place."""
    is_open: bool = True
    """Whether samples that wait may get places."""
    num_groups: int = 0
    """Groups that were handed to it and are not finished."""
    idle_s: float = 0.0
    """Time without a running sample."""
    place_s: float = 0.0
    """Time of all places that were taken, added up."""
    stamp: int = 0
    """Grows with each change of what runs: an end that was reckoned before does not hold any more."""
    _waiting: deque[tuple[_Owner, int]] = field(default_factory=deque)
    _running: list[tuple[float, int, _Owner]] = field(default_factory=list)
    _num_begun: int = 0
    _tokens: float = 0.0
    _debt_s: float = 0.0
    _now: float = 0.0
    _step_s: float = 0.0

    @property
    def num_running(self) -> int:
        """Samples with a place."""
        return len(self._running)

    def put(self, owner: _Owner, length: int) -> None:
        """A sample waits for a place."""
        self._waiting.append((owner, length))

    def put_aside(self) -> list[tuple[_Owner, int]]:
        """Take all samples away, with the tokens that they lack; the time must have been settled."""
        left = [(owner, max(1, round(end - self._tokens))) for end, _, owner in self._running]
        left += self._waiting
        self._running.clear()
        self._waiting.clear()
        self.stamp += 1
        return left

    def pause(self, seconds: float) -> None:
        """Nothing is decoded for so long."""
        self._debt_s += seconds
        self.stamp += 1

    def settle(self, now: float) -> list[_Owner]:
        """Let the time pass until ``now``; returns the owners of the samples that ended, one for each."""
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
        """Give free places to those that wait; the time must have been settled."""
        while self.is_open and self._waiting and len(self._running) < self.places:
            owner, length = self._waiting.popleft()
            self._num_begun += 1
            self.begun(owner)
            heappush(self._running, (self._tokens + length, self._num_begun, owner))
        if self._running:
            self._step_s = self.step_seconds(len(self._running))
        self.stamp += 1

    def next_end(self) -> float | None:
        """When the next sample ends if nothing changes; None if none runs."""
        if not self._running:
            return None
        tokens = max(0.0, self._running[0][0] - self._tokens)
        return self._now + self._debt_s + tokens * self._step_s


@dataclass(slots=True)
class SimulatedGroup:
    """A group that is being generated."""

    group: Group
    lengths: tuple[int, ...]
    engines: tuple[int, ...]
    left: int
    version: int = -1
    """Under which its first token was made."""

    @property
    def tokens(self) -> int:
        """Of all its samples."""
        return sum(self.lengths)


@dataclass(slots=True)
class ParkedGroup:
    """What an engine that stands still had of a group, until another one takes it."""

    made: SimulatedGroup
    engine: int
    tokens: list[int]
    """That its samples lack."""

    def go_on(self, engines: Sequence[SimulatedEngine[SimulatedGroup]], number: int) -> None:
        """Give it to an engine, whose time must have been settled."""
        self.made.engines = tuple(number if n == self.engine else n for n in self.made.engines)
        engines[number].num_groups += 1
        for count in self.tokens:
            engines[number].put(self.made, count)


def put_aside(engines: Sequence[SimulatedEngine[SimulatedGroup]]) -> list[ParkedGroup]:
    """Take all groups from engines, whose time must have been settled; the oldest group comes first."""
    found: dict[tuple[int, int], ParkedGroup] = {}
    for number, engine in enumerate(engines):
        for made, tokens in engine.put_aside():
            key = made.group.sequence, number
            found.setdefault(key, ParkedGroup(made, number, [])).tokens.append(tokens)
        engine.num_groups = 0
    return [found[key] for key in sorted(found)]
