"""How many groups a replica works on: additive increase, multiplicative decrease.

A full transferqueue or a crowded KV cache slows the intake before anything breaks.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_CROWDED_KV = 0.95
_SLOW_PUBLISH_S = 2.0
_DECREASE = 0.5


class Admission:
    """A limit on groups in work that follows the pressure behind them.

    Args:
        maximum: The limit without pressure.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self.limit = maximum
        self._num_admitted = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Wait for room, and take it while the block runs."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_admitted < self.limit)
            self._num_admitted += 1
        try:
            yield
        finally:
            self._num_admitted -= 1
            async with self._changed:
                self._changed.notify()

    async def adapt(self, *, kv_used_fraction: float, publish_wait_s: float) -> None:
        """Follow the pressure; called at regular intervals.

        Args:
            kv_used_fraction: Part of the KV cache in use, 0 to 1.
            publish_wait_s: How long the oldest unfinished publication has been waiting.
        """
        if kv_used_fraction >= _CROWDED_KV or publish_wait_s >= _SLOW_PUBLISH_S:
            # From what is in work, not from a limit that was never reached.
            self.limit = max(1, int(min(self.limit, self._num_admitted) * _DECREASE))
        elif self.limit < self._maximum:
            self.limit += 1
        async with self._changed:
            self._changed.notify_all()
