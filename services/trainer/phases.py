"""How the time of a step, and that between two steps, is spent."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class PhaseTimer:
    """Seconds per phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time of the block to ``phase``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent


class IdleClock:
    """Seconds between two steps. What the run does not explain went into its own work and its messages."""

    def __init__(self) -> None:
        self._ended: float | None = None
        self._worked = 0.0

    def step_begins(self, waits: Mapping[str, float]) -> dict[str, float]:
        """Seconds since the last step, by reason; nothing before the first.

        Args:
            waits: What the run says that it waited for.
        """
        worked, self._worked = self._worked, 0.0
        if self._ended is None:
            return {}
        rest = time.perf_counter() - self._ended - sum(waits.values())
        # The run waited for groups while others of the step were trained already.
        waited = waits.get("no_data", 0.0)
        idle = {**waits, "no_data": max(waited - worked, 0.0)} if worked else waits
        return {**idle, "control": max(rest - max(worked - waited, 0.0), 0.0)}

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around what is done for the next step before it begins."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._worked += time.perf_counter() - start

    def step_ended(self) -> None:
        """From now on nothing is trained."""
        self._ended = time.perf_counter()
