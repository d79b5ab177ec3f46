"""Why no step is trained: the time between two steps, by what was waited for."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class IdleClock:
    """Seconds between two steps. What is not explained was spent without data."""

    def __init__(self) -> None:
        self._ended: float | None = None
        self._spans: dict[str, tuple[float, float]] = {}

    @contextmanager
    def __call__(self, reason: str) -> Iterator[None]:
        """Count the time from the first such block between two steps to the end of the last one."""
        start = time.perf_counter()
        try:
            yield
        finally:
            first, _ = self._spans.get(reason, (start, start))
            self._spans[reason] = (first, time.perf_counter())

    def step_begins(self) -> dict[str, float]:
        """Seconds since the last step, by reason; nothing before the first."""
        if self._ended is None:
            return {}
        rest = time.perf_counter() - self._ended
        seconds = {reason: end - start for reason, (start, end) in self._spans.items()}
        return {**seconds, "no_data": max(rest - sum(seconds.values()), 0.0)}

    def step_ended(self) -> None:
        """From now on nothing is trained."""
        self._ended = time.perf_counter()
        self._spans.clear()
