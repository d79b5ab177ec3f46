"""Measures what the trainer waits for between two steps."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Wait = Literal["no_data", "barrier", "scoring", "weight_sync", "handover", "checkpoint"]
"""``no_data``: groups are not finished. ``barrier``: a batch is ready, but training waits for
groups that would grow too stale. ``scoring``: other workers score the batch.
``handover``: rollouts leave GPUs that they share with the trainer."""


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
            spent = time.perf_counter() - start
            self.seconds[reason] = self.seconds.get(reason, 0.0) + spent

    def worked(self, seconds: float) -> None:
        """Records seconds in which the trainer accumulated early groups during the wait for others."""
        self._worked += seconds

    def for_data(self) -> float:
        """Returns the seconds in which no batch could be formed and the trainer was idle."""
        waited = self.seconds.get("no_data", 0.0) + self.seconds.get("barrier", 0.0)
        return max(waited - self._worked, 0.0)

    def take(self) -> dict[str, float]:
        """Returns and resets the waiting times."""
        spent, self.seconds, self._worked = self.seconds, {}, 0.0
        return spent
