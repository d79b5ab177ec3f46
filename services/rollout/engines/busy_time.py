"""How long an engine had work, and how long it had none."""

import time


class BusyTime:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._started_at = time.monotonic()
        self._since: float | None = None
        self._seconds = 0.0

    def begin(self) -> None:
        """There is work from now on."""
        if self._since is None:
            self._since = time.monotonic()

    def end(self) -> None:
        """There is none any more."""
        if self._since is not None:
            self._seconds += time.monotonic() - self._since
            self._since = None

    @property
    def idle_seconds(self) -> float:
        """Seconds without work so far."""
        now = time.monotonic()
        busy = self._seconds + (0.0 if self._since is None else now - self._since)
        return now - self._started_at - busy
