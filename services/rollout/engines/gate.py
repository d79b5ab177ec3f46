"""A gate: many may pass at once, and one may close it and be alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Passages run together; who closes the gate waits for them and holds new ones back."""

    def __init__(self) -> None:
        self._num_inside = 0
        self._is_closed = False
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def passage(self) -> AsyncIterator[None]:
        """Wait while the gate is closed; it cannot be closed while the block runs."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_closed)
            self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1
            async with self._changed:
                self._changed.notify_all()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Close the gate while the block runs, once everyone inside has left."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_closed)
            self._is_closed = True
            await self._changed.wait_for(lambda: self._num_inside == 0)
        try:
            yield
        finally:
            self._is_closed = False
            async with self._changed:
                self._changed.notify_all()
