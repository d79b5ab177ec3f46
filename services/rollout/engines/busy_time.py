"""Measures an engine's idle time."""

import time


class BusyTime:
    """Accumulates busy and idle time from its creation on."""

    def __init__(self) -> None:
        self._started_at = time.monotonic()
        self._since: float | None = None
        self._seconds = 0.0

    def begin(self) -> None:
        """Marks the engine as busy."""
        if self._since is None:
            self._since = time.monotonic()

    def end(self) -> None:
        """Marks the engine as idle."""
        if self._since is not None:
            self._seconds += time.monotonic() - self._since
            self._since = None

    @property
    def idle_seconds(self) -> float:
        """Idle seconds so far."""
        now = time.monotonic()
        busy = self._seconds + (0.0 if self._since is None else now - self._since)
        return now - self._started_at - busy
