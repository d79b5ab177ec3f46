"""How fast a run would be with other places, rates and lags: ``python -m bench.pace.simulated``, seconds.

The controller's own rules (which groups start, which are trained, who is waited for) over an engine and a
trainer that are numbers, in simulated time. With the rates of two H200s it comes within 2 % of what was
measured there: 112 samples/s at 31,000 tokens/s with .5 s of each step at the barrier, 155 at 45,000.
"""

import argparse
import itertools
from collections import deque
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from bench.pace.fakes import Pace
from services.controller.rules.groups import Group
from services.controller.rules.place_use import PlaceUse
from services.controller.rules.replay import choose_batch
from services.controller.rules.staleness import StalenessGate

GROUPS, GROUP_SIZE = 32, 8
_TICK_S = 0.02
_SETTLED = 5
"""Steps before the measured ones."""


@dataclass(slots=True)
class _Running:
    """A group that is being generated."""

    group: Group
    lengths: tuple[int, ...]
    left: int = GROUP_SIZE


@dataclass(slots=True)
class Simulation:
    """One run."""

    pace: Pace
    places: int
    lag: int
    steps: int
    now: float = 0.0
    version: int = 0
    waiting: deque[tuple[_Running, int]] = field(default_factory=deque)
    """Samples in the engine's queue, with their lengths."""
    decoding: list[tuple[_Running, float]] = field(default_factory=list)
    """Samples with a place, and the tokens that they still lack."""
    running: dict[int, _Running] = field(default_factory=dict)
    ready: list[Group] = field(default_factory=list)
    num_issued: int = 0
    ends: list[float] = field(default_factory=list)
    """When each step was trained."""
    idle: dict[str, float] = field(default_factory=lambda: {"barrier": 0.0, "no_data": 0.0})
    staleness: list[int] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        """Simulate; returns samples trained per second and why the trainer idled, in seconds a step."""
        gate = StalenessGate(max_staleness=self.lag, groups_per_step=GROUPS)
        use = PlaceUse(self.places, GROUP_SIZE)
        trained_at: float | None = None
        while len(self.ends) < self.steps:
            self._decode(use)
            self.now += _TICK_S
            if trained_at is not None and self.now >= trained_at:
                self.ends.append(self.now)
                self.version += 1
                trained_at = None
            if trained_at is None and self._take_batch(gate):
                trained_at = self.now + self.pace.train_s
            self._hand_out(gate, use)
        step_s = (self.ends[-1] - self.ends[_SETTLED - 1]) / (self.steps - _SETTLED)
        return {
            "samples_per_s": round(GROUPS * GROUP_SIZE / step_s, 1),
            **{f"{why}_s": round(spent / self.steps, 2) for why, spent in self.idle.items()},
            "staleness_mean": round(fmean(self.staleness), 2),
        }

    def _decode(self, use: PlaceUse) -> None:
        while self.waiting and len(self.decoding) < self.places:
            running, length = self.waiting.popleft()
            if running.group.oldest_version < 0:
                running.group.oldest_version = self.version
            self.decoding.append((running, float(length)))
        if not self.decoding:
            return
        made = _TICK_S / self.pace.step_seconds(len(self.decoding))
        self.decoding = [(running, left - made) for running, left in self.decoding]
        for running, left in self.decoding:
            if left <= 0:
                running.left -= 1
                if not running.left:
                    use.finished(running.lengths)
                    self.ready.append(self.running.pop(running.group.sequence).group)
        self.decoding = [(running, left) for running, left in self.decoding if left > 0]

    def _take_batch(self, gate: StalenessGate) -> bool:
        begun = [r.group for r in self.running.values() if r.group.oldest_version >= 0]
        choice = choose_batch(
            self.ready,
            begun,
            gate=gate,
            trainer_version=self.version,
            wait_for_due=True,
            keep_stale=True,
        )
        if not choice.batch:
            self.idle["barrier" if choice.awaited else "no_data"] += _TICK_S
            return False
        self.staleness += [self.version - group.oldest_version for group in choice.batch]
        chosen = {group.sequence for group in choice.batch}
        self.ready = [group for group in self.ready if group.sequence not in chosen]
        return True

    def _hand_out(self, gate: StalenessGate, use: PlaceUse) -> None:
        ahead = max(0, len(self.ready) - GROUPS)
        free = use.num_groups(1) - len(self.running) - ahead
        room = gate.capacity(published=self.version, num_admitted=self.num_issued, most=free)
        for _ in range(room):
            first = self.num_issued * GROUP_SIZE
            lengths = tuple(self.pace.length(first + member) for member in range(GROUP_SIZE))
            running = _Running(Group(sequence=self.num_issued, row=0), lengths)
            self.running[self.num_issued] = running
            self.waiting.extend((running, length) for length in lengths)
            self.num_issued += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--places", type=int, nargs="+", default=[192, 256, 384])
    parser.add_argument("--rates", type=float, nargs="+", default=[31_000.0, 45_000.0])
    parser.add_argument("--lags", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    for rate, lag, places in itertools.product(options.rates, options.lags, options.places):
        pace = replace(Pace(), tokens_per_s=rate)
        found = Simulation(pace, places, lag, options.steps).run()
        print(f"{rate:,.0f} tokens/s, lag {lag}, {places} places: {found}", flush=True)


if __name__ == "__main__":
    main()
