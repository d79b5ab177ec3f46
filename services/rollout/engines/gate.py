"""Asynchronous shared/exclusive lock that can also be held shut."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Gate:
    """Lets many tasks pass at once; a task that closes the gate waits for them and excludes new ones.

    The gate can also be held shut for a longer time, during which tasks can still close it.
    """

    def __init__(self) -> None:
        self._num_inside = 0
        self._is_closed = False
        self._is_held = False
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def passage(self, *, give_up: Callable[[], bool]) -> AsyncIterator[None]:
        """Waits while the gate is shut; the gate cannot be closed while the block runs.

        Args:
            give_up: Checked while the gate is shut; if it returns True, the task enters anyway and must find
                out the reason itself.
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: give_up() or not (self._is_closed or self._is_held)
            )
            self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1
            await self._notify()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Closes the gate while the block runs, after all tasks inside have left."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_closed)
            self._is_closed = True
            try:
                await self._changed.wait_for(lambda: self._num_inside == 0)
            except asyncio.CancelledError:
                self._is_closed = False
                raise
        try:
            yield
        finally:
            self._is_closed = False
            await self._notify()

    def hold(self) -> None:
        """Holds the gate shut until :meth:`release`."""
        self._is_held = True

    async def release(self) -> None:
        """Ends a hold and lets waiting tasks pass."""
        self._is_held = False
        await self._notify()

    async def recheck(self) -> None:
        """Makes every waiting task check its ``give_up`` condition again."""
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
