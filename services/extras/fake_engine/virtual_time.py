"""Event loop whose time is virtual."""

import asyncio
import selectors
from collections.abc import Callable


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Runs timers in order without waiting for them: simulates hours in seconds.

    ``asyncio.sleep`` and time-outs are virtual; sockets, threads and processes are not, so a
    simulation must not wait for them.
    """

    def __init__(self) -> None:
        self._jumped_s = 0.0
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        return self._jumped_s

    def _jump(self, seconds: float) -> None:
        self._jumped_s += seconds


class _JumpingSelector(selectors.DefaultSelector):
    """Never blocks while a timer is pending: turns the requested wait into a jump of the clock."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0 if timeout is not None else None)
        if not events and timeout is not None and timeout > 0:
            self._jump(timeout)
        return events
