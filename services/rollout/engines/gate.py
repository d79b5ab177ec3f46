"""A gate: many may pass at once, and one may close it and be alone."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Gate:
    """Passages run together; who closes the gate waits for them and holds new ones back.

    Beside that, the gate can be held shut over a longer time, in which it can still be closed.
    """

    def __init__(self) -> None:
        self._num_inside = 0
        self._is_closed = False
        self._is_held = False
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def passage(self, *, give_up: Callable[[], bool]) -> AsyncIterator[None]:
        """Wait while the gate is shut; it cannot be closed while the block runs.

        Args:
            give_up: Asked when the gate is shut; True enters nevertheless, to find out why.
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
        """Close the gate while the block runs, once everyone inside has left."""
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
        """Hold the gate shut until :meth:`release`."""
        self._is_held = True

    async def release(self) -> None:
        """Let who waits pass again."""
        self._is_held = False
        await self._notify()

    async def reconsider(self) -> None:
        """Let everyone who waits ask again whether to give up."""
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
