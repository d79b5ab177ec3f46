"""Rate limit for unknown tokens per address, because each lookup costs at least one query."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.requests import Request

from services.controller import metrics
from services.controller.api.request_limits import RateLimitedError

_PER_SECOND = 10.0
_BURST = 50.0
_MAX_PEERS = 4096
_MAX_WAITING = 64
_AT_ONCE = 2


def peer_of(request: Request) -> str:
    """Returns the address that a request comes from."""
    return request.client.host if request.client else ""


class AuthRateLimit:
    """Counts calls with unknown tokens. Belongs to the event loop's thread.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._used: dict[str, tuple[float, float]] = {}
        """Per address: counted calls, and the time of the count."""
        self._lookups = asyncio.Semaphore(_AT_ONCE)
        self._num_waiting = 0

    @asynccontextmanager
    async def lookup(self) -> AsyncIterator[None]:
        """Limits concurrent token lookups, so that unknown callers do not delay authenticated ones.

        Raises:
            RateLimitedError: If too many lookups wait.
        """
        if self._num_waiting >= _MAX_WAITING:
            metrics.API_REFUSALS.labels("rate_limited").inc()
            raise RateLimitedError(
                "too many calls with unknown tokens come at once; send it again", retry_after_s=1.0
            )
        self._num_waiting += 1
        try:
            async with self._lookups:
                yield
        finally:
            self._num_waiting -= 1

    def admit(self, peer: str) -> None:
        """Counts a call whose token has to be looked up.

        Raises:
            RateLimitedError: If too many tokens from this address were unknown.
        """
        over = self._now(peer) + 1.0 - _BURST
        if over > 0:
            metrics.API_REFUSALS.labels("rate_limited").inc()
            raise RateLimitedError(
                f"too many calls with unknown tokens came from {peer}; send fewer, with the right one",
                retry_after_s=over / _PER_SECOND,
                peer=peer,
            )
        if peer not in self._used and len(self._used) >= _MAX_PEERS:
            self._used.clear()
        self._used[peer] = (self._now(peer) + 1.0, self._clock())

    def forgive(self, peer: str) -> None:
        """Takes a counted call back, after its token turned out to be known."""
        self._used[peer] = (max(self._now(peer) - 1.0, 0.0), self._clock())

    def _now(self, peer: str) -> float:
        used, when = self._used.get(peer, (0.0, 0.0))
        return max(used - (self._clock() - when) * _PER_SECOND, 0.0)
