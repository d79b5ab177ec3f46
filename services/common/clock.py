"""Time as an argument, so that tests are exact. The module ``time`` is the clock of the host."""

from typing import Protocol


class Clock(Protocol):
    """Tells the time."""

    def time(self) -> float:
        """Seconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds that never go back."""
