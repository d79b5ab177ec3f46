"""Time as an argument, so that tests are exact."""

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time."""

    def time(self) -> float:
        """Seconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds that never go back."""


class SystemClock:
    """The clock of the host."""

    def time(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()
