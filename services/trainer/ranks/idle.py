"""Why no step is trained: the time between two steps, by what was waited for."""

import time
from collections.abc import Mapping


class IdleClock:
    """Seconds between two steps. What the run does not explain went into its own work and its messages."""

    def __init__(self) -> None:
        self._ended: float | None = None

    def step_begins(self, waits: Mapping[str, float]) -> dict[str, float]:
        """Seconds since the last step, by reason; nothing before the first.

        Args:
            waits: What the run says that it waited for.
        """
        if self._ended is None:
            return {}
        rest = time.perf_counter() - self._ended - sum(waits.values())
        return {**waits, "control": max(rest, 0.0)}

    def step_ended(self) -> None:
        """From now on nothing is trained."""
        self._ended = time.perf_counter()
