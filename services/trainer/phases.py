"""Timers for the phases of a step and for the idle time between steps."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class PhaseTimer:
    """Measures seconds per phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds the time of the block to ``phase``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent


class IdleClock:
    """Measures idle seconds between two steps, by reason.

    Time that the run does not account for counts as ``control``: the run's own work and its messages.
    """

    def __init__(self) -> None:
        self._ended: float | None = None
        self._worked = 0.0

    def step_begins(self, waits: Mapping[str, float]) -> dict[str, float]:
        """Returns the idle seconds since the last step by reason; nothing before the first step.

        Args:
            waits: Seconds that the run reports to have waited, by reason.
        """
        worked, self._worked = self._worked, 0.0
        if self._ended is None:
            return {}
        rest = time.perf_counter() - self._ended - sum(waits.values())
        # While the run waited for the last groups, earlier ones of the step were trained already.
        waited = waits.get("no_data", 0.0)
        idle = {**waits, "no_data": max(waited - worked, 0.0)} if worked else waits
        return {**idle, "control": max(rest - max(worked - waited, 0.0), 0.0)}

    @contextmanager
    def working(self) -> Iterator[None]:
        """Counts the block as work for the next step, before that step begins."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._worked += time.perf_counter() - start

    def step_ended(self) -> None:
        """Starts the idle time after a step."""
        self._ended = time.perf_counter()
