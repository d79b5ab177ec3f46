"""Measures what the trainer waits for between two steps, and reports a run that trains no step."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from services.common.host import Clock
from services.controller.rules.ledger import RUNNING, WAITING, GroupState, Ledger
from services.controller.run.state.journal import Journal
from services.controller.store.records import Note

Wait = Literal["no_data", "barrier", "scoring", "weight_sync", "gpu_switch", "checkpoint"]
"""``no_data``: groups are not finished. ``barrier``: a batch is ready, but training waits for
groups that would become too stale. ``scoring``: other workers score the batch.
``gpu_switch``: rollouts leave GPUs that they share with the trainer."""

_MIN_PATIENCE_S = 60.0
_PATIENCE_STEPS = 3
_REMEMBERED = 8
_REASONS: dict[Wait, tuple[str, str]] = {
    "barrier": (
        "WaitsForOldest",
        "the batch waits for running groups that would otherwise become too stale",
    ),
    "scoring": ("WaitsForScores", "other workers are scoring the batch"),
    "weight_sync": ("WaitsForWeights", "weights are being transferred to the rollouts"),
    "gpu_switch": ("WaitsForGpus", "shared GPUs are being switched to the trainer"),
    "checkpoint": ("WaitsForCheckpoint", "a checkpoint is being written"),
}


class Waits:
    """Waiting times since the last step in seconds, by reason."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._worked = 0.0
        self.current: Wait | None = None
        """Reason of the current wait; None while the loop does not wait."""

    @contextmanager
    def __call__(self, reason: Wait) -> Iterator[None]:
        """Adds the duration of the block to ``reason``."""
        start, before = time.perf_counter(), self.current
        self.current = reason
        try:
            yield
        finally:
            self.current = before
            duration_s = time.perf_counter() - start
            self.seconds[reason] = self.seconds.get(reason, 0.0) + duration_s

    def add_work(self, seconds: float) -> None:
        """Records seconds in which the trainer accumulated early groups during the wait for others."""
        self._worked += seconds

    def for_data(self) -> float:
        """Returns the seconds in which no batch could be formed and the trainer was idle."""
        waited_s = self.seconds.get("no_data", 0.0) + self.seconds.get("barrier", 0.0)
        return max(waited_s - self._worked, 0.0)

    def pop(self) -> dict[str, float]:
        """Returns and resets the waiting times."""
        seconds, self.seconds, self._worked = self.seconds, {}, 0.0
        return seconds


@dataclass(slots=True, kw_only=True)
class StallReporter:
    """Reports a run that trains no step, at doubling intervals and with the current reason."""

    journal: Journal
    waits: Waits
    ledger: Ledger
    groups_per_step: int
    clock: Clock
    activity: Callable[[], str]
    """Returns the run's activity, such as ``TRAINING``."""
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED), init=False)
    _since: float = field(default=0.0, init=False)
    _stepped: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def record_step(self) -> None:
        """Records a committed step."""
        now = self.clock.monotonic()
        self._seconds.append(now - self._since)
        self._since = now
        self._stepped.set()

    @property
    def patience_s(self) -> float:
        """Seconds without a step after which the run is reported."""
        return max(_MIN_PATIENCE_S, _PATIENCE_STEPS * max(self._seconds, default=0.0))

    async def watch(self) -> None:
        self._since, patience_s = self.clock.monotonic(), self.patience_s
        while True:
            try:
                async with asyncio.timeout(patience_s):
                    await self._stepped.wait()
                self._stepped.clear()
                patience_s = self.patience_s
            except TimeoutError:
                await self._report()
                patience_s *= 2

    async def _report(self) -> None:
        reason, why = self.waiting_reason()
        still_s = self.clock.monotonic() - self._since
        message = f"no step finished for {still_s:.0f} s: {why}"
        data = {"reason": reason, "seconds": still_s}
        await self.journal.record_event(Note("NoProgress", message, data), self.ledger)

    def waiting_reason(self) -> tuple[str, str]:
        """Returns a stable code for what the run waits for, and a message."""
        reason = self.waits.current
        if reason is not None and reason != "no_data":
            return _REASONS[reason]
        if self.activity() == "TRAINING":
            return "StepIsLong", "the trainer is training the batch"
        ledger = self.ledger
        num_ready, num_running = ledger.count(GroupState.READY), ledger.count(*RUNNING)
        readiness = f"{num_ready} of {self.groups_per_step} groups are finished"
        counts = ", ".join(f"{count} {name}" for name, count in sorted(ledger.reasons().items()))
        drops = f"; dropped so far: {counts}" if counts else ""
        if num_running:
            return "WaitsForGroups", f"{readiness}, {num_running} are being generated{drops}"
        waiting = ledger.count(*WAITING)
        if waiting:
            return (
                "NoGroupRuns",
                f"{readiness}, {waiting} wait for a rollout, none is running; check the rollouts{drops}",
            )
        return (
            "NoGroupRuns",
            f"{readiness}; no other group may start before new weights are served{drops}",
        )
