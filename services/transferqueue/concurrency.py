"""Named waits, and work in threads."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Waiters:
    """Condition variables by name: tasks wait for a name until another one wakes it."""

    def __init__(self) -> None:
        self._parked: dict[str, set[asyncio.Future[None]]] = {}

    def wake(self, name: str) -> None:
        for waiter in self._parked.pop(name, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, name: str, *, timeout_s: float | None) -> None:
        """Waits for ``wake(name)`` or until the time-out; returns in both cases."""
        waiter = asyncio.get_running_loop().create_future()
        self._parked.setdefault(name, set()).add(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            return
        finally:
            parked = self._parked.get(name, set())
            parked.discard(waiter)
            if not parked:
                self._parked.pop(name, None)


async def in_thread(work: Callable[[], T]) -> T:
    """Runs ``work`` in a thread; returns only after the work has ended, also on cancellation.

    Until then the thread uses its memory, which nothing else may reuse.
    """
    working = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise
