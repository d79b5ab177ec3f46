"""What a run spends its time on between two steps of the trainer."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Wait = Literal["no_data", "barrier", "old_logprob", "values", "weight_sync", "checkpoint"]
"""``no_data``: groups are not finished. ``barrier``: a batch is there, but training waits for groups that
would grow too stale. ``old_logprob``, ``values``: other workers score the batch."""


class Waits:
    """Seconds since the last step, by reason."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, reason: Wait) -> Iterator[None]:
        """Add the time of the block to ``reason``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[reason] = self.seconds.get(reason, 0.0) + spent

    def for_data(self) -> float:
        """Seconds for which no batch could be formed."""
        return self.seconds.get("no_data", 0.0) + self.seconds.get("barrier", 0.0)

    def take(self) -> dict[str, float]:
        """What was spent so far; from now on it counts anew."""
        spent, self.seconds = self.seconds, {}
        return spent
