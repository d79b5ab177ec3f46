"""Interface of a clock, so that tests can control time. The module ``time`` is the clock of the host."""

from typing import Protocol


class Clock(Protocol):
    """Source of the current time."""

    def time(self) -> float:
        """Returns seconds since the epoch."""

    def monotonic(self) -> float:
        """Returns seconds that never decrease."""
