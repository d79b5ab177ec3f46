"""Admission limit for groups: additive increase, multiplicative decrease.

The limit slows the intake before the transferqueue is full or the KV cache overflows.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_CROWDED_KV = 0.95
_SLOW_PUBLISH_S = 2.0
_DECREASE = 0.5


class Admission:
    """Limits concurrent groups by the load of the KV cache and the transferqueue.

    Args:
        maximum: The limit without load.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self.limit = maximum
        self._num_admitted = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Waits until the limit allows another group, which counts while the block runs."""
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
        """Lowers or raises the limit; to be called at regular intervals.

        Args:
            kv_used_fraction: Fraction of the KV cache in use, 0 to 1.
            publish_wait_s: Age of the oldest unfinished publication.
        """
        if kv_used_fraction >= _CROWDED_KV or publish_wait_s >= _SLOW_PUBLISH_S:
            # Start from the groups that run, not from a limit that was never reached.
            self.limit = max(1, int(min(self.limit, self._num_admitted) * _DECREASE))
        elif self.limit < self._maximum:
            self.limit += 1
        async with self._changed:
            self._changed.notify_all()
