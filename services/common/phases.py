"""Times the phases of an operation."""

import time

from prometheus_client import Histogram


class Phases:
    """Times consecutive phases, for a histogram and for a log line.

    Args:
        histogram: Histogram with the phase as label.
    """

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._since = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def done(self, phase: str) -> None:
        """Records the end of a phase; the next one begins."""
        now = time.perf_counter()
        self._seconds[phase] = now - self._since
        self._histogram.labels(phase).observe(now - self._since)
        self._since = now

    def milliseconds(self) -> dict[str, float]:
        """Returns the durations of all phases so far as fields of a log line: ``<phase>_ms``."""
        return {f"{phase}_ms": round(1e3 * value, 1) for phase, value in self._seconds.items()}
