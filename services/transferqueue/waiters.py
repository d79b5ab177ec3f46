"""Coroutines that wait for something to change, without polling."""

import asyncio


class Waiters:
    """Parked waits, by what they wait for."""

    def __init__(self) -> None:
        self._parked: dict[str, set[asyncio.Future[None]]] = {}

    def wake(self, name: str) -> None:
        """End the waits for ``name``."""
        for waiter in self._parked.pop(name, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, name: str, *, timeout_s: float | None) -> None:
        """Wait for ``wake(name)``; returns when the time is over, too."""
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
