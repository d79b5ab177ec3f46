"""Bucket bounds of Prometheus histograms, and timers of phases and of idle time."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from prometheus_client import Histogram

# Upper bounds; the bound of 0.3 s in `SYNC` makes "syncs under 300 ms" a direct ratio.
SPANS: Final = (1, 2, 3, 4, 5, 8, 12, 16)
SYNC: Final = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 20, 30, 60, 120, 300,
)  # fmt: skip
RPC: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
USER_CODE: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 1200, 3600,
)  # fmt: skip
STEP: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 3600)
# Bounds as fine as those of the per-step histograms, so that quantiles of short responses are not
# interpolated between 0 and 16.
TOKENS: Final = (1, 2, *(size for power in range(2, 17) for size in (3 << power - 2, 1 << power)))


class Phases:
    """Times consecutive phases, for a histogram and for a log line."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._since = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def end_phase(self, phase: str) -> None:
        """Records the end of a phase; the next one begins."""
        now = time.perf_counter()
        self._seconds[phase] = now - self._since
        self._histogram.labels(phase).observe(now - self._since)
        self._since = now

    def milliseconds(self) -> dict[str, float]:
        """Returns the durations of all phases so far as fields of a log line: ``<phase>_ms``."""
        return {f"{phase}_ms": round(1e3 * value, 1) for phase, value in self._seconds.items()}


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
            duration_s = time.perf_counter() - start
            self.seconds[phase] = self.seconds.get(phase, 0.0) + duration_s


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
        # The trainer trained finished groups of the next step while the run waited for the last ones.
        waited_s = waits.get("no_data", 0.0)
        idle = {**waits, "no_data": max(waited_s - worked, 0.0)} if worked else waits
        return {**idle, "control": max(rest - max(worked - waited_s, 0.0), 0.0)}

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
