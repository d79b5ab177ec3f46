"""What a run spends its time on between two steps of the trainer."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Wait = Literal[
    "no_data", "barrier", "old_logprob", "values", "weight_sync", "handover", "checkpoint"
]
"""``no_data``: groups are not finished. ``barrier``: a batch is there, but training waits for groups that
would grow too stale. ``old_logprob``, ``values``: other workers score the batch. ``handover``: rollouts leave
GPUs that they share with the trainer."""


class Waits:
    """Seconds since the last step, by reason."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._worked = 0.0
        self.current: Wait | None = None
        """What is waited for now."""

    @contextmanager
    def __call__(self, reason: Wait) -> Iterator[None]:
        """Add the time of the block to ``reason``."""
        start, before = time.perf_counter(), self.current
        self.current = reason
        try:
            yield
        finally:
            self.current = before
            spent = time.perf_counter() - start
            self.seconds[reason] = self.seconds.get(reason, 0.0) + spent

    def worked(self, seconds: float) -> None:
        """The trainer had groups of the next batch for so long while the others were waited for."""
        self._worked += seconds

    def for_data(self) -> float:
        """Seconds for which no batch could be formed, and the trainer had nothing to do."""
        waited = self.seconds.get("no_data", 0.0) + self.seconds.get("barrier", 0.0)
        return max(waited - self._worked, 0.0)

    def take(self) -> dict[str, float]:
        """What was spent so far; from now on it counts anew."""
        spent, self.seconds, self._worked = self.seconds, {}, 0.0
        return spent
