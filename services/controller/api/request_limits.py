"""Limits of the API's use: a project's requests per second and open streams, and failed sign-ins.

Each controller counts its own requests, in memory.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from starlette.requests import Request

from services.common.errors import ResourceExhaustedError, UnauthenticatedError
from services.common.http.limits import MAX_UNAUTHENTICATED
from services.controller import metrics
from services.controller.settings import Limits

# Seconds' worth of requests that may arrive at once.
_BURST_S = 2.0
# Delay in seconds until changed limits take effect.
_CACHE_S = 5.0
# A fixed delay, because the end of another stream cannot be predicted.
_STREAM_RETRY_S = 10.0


class RateLimitedError(ResourceExhaustedError):
    """The project sends too many requests."""

    reason = "RATE_LIMITED"


class TooManyStreamsError(ResourceExhaustedError):
    """The project has too many open streams."""

    reason = "TOO_MANY_STREAMS"


@dataclass(slots=True)
class _Bucket:
    """Token bucket of a project."""

    limits: Limits
    read_time: float
    tokens: float
    fill_time: float


class RequestLimits:
    """Admits requests and streams. Belongs to the event loop's thread."""

    def __init__(
        self,
        limits_of: Callable[[str], Awaitable[Limits]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits_of = limits_of
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}
        self._streams: Counter[str] = Counter()

    async def admit(self, project: str) -> None:
        """Admits a request.

        Raises:
            RateLimitedError: If the project has used up its rate.
        """
        bucket = await self._bucket(project)
        rate = bucket.limits.max_requests_per_second
        if not rate:
            return
        now = self._clock()
        bucket.tokens = min(bucket.tokens + (now - bucket.fill_time) * rate, rate * _BURST_S)
        bucket.fill_time = now
        if bucket.tokens < 1.0:
            metrics.API_REFUSALS.labels("rate_limited").inc()
            raise RateLimitedError(
                f"project {project!r} may send {rate} requests per second; send fewer",
                retry_after_s=(1.0 - bucket.tokens) / rate,
                project=project,
            )
        bucket.tokens -= 1.0

    @contextmanager
    def stream(self, project: str) -> Iterator[None]:
        """Counts a stream of a project until the block ends; :meth:`admit` must have admitted its request.

        Raises:
            TooManyStreamsError: If the project has the maximum number of open streams.
        """
        limit = self._buckets[project].limits.max_event_streams
        if limit and self._streams[project] >= limit:
            metrics.API_REFUSALS.labels("too_many_streams").inc()
            raise TooManyStreamsError(
                f"project {project!r} has the maximum of {limit} open streams; close one",
                retry_after_s=_STREAM_RETRY_S,
                project=project,
            )
        self._streams[project] += 1
        metrics.EVENT_STREAMS.inc()
        try:
            yield
        finally:
            self._streams[project] -= 1
            metrics.EVENT_STREAMS.dec()

    def num_streams(self, project: str) -> int:
        """Returns the number of a project's streams that are open here."""
        return self._streams[project]

    async def _bucket(self, project: str) -> _Bucket:
        now, bucket = self._clock(), self._buckets.get(project)
        if bucket is None or now - bucket.read_time > _CACHE_S:
            limits = await self._limits_of(project)
            bucket = self._buckets.get(project)
            if bucket is None:
                full = limits.max_requests_per_second * _BURST_S
                bucket = self._buckets[project] = _Bucket(limits, now, full, now)
            bucket.limits, bucket.read_time = limits, now
        return bucket


_PER_SECOND = 10.0
_BURST = 50.0
_MAX_PEERS = 4096
# As many connections as may be open before their peers have authenticated.
_MAX_WAITING = MAX_UNAUTHENTICATED
_MAX_CONCURRENT = 2


def peer_of(request: Request) -> str:
    return request.client.host if request.client else ""


class AuthRateLimit:
    """Limits lookups of tokens that are not known yet. Belongs to the event loop's thread.

    Only tokens that turn out to be unknown count, so any number of callers with valid tokens may start
    at once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed: dict[str, tuple[float, float]] = {}
        """Per address: counted unknown tokens, and the time of the count."""
        self._lookups = asyncio.Semaphore(_MAX_CONCURRENT)
        self._num_waiting = 0

    @asynccontextmanager
    async def limit_lookups(self, peer: str) -> AsyncIterator[None]:
        """Limits concurrent lookups, so that unknown callers do not delay authenticated ones.

        Counts the lookup if the block raises UnauthenticatedError.

        Raises:
            RateLimitedError: If too many lookups wait, or too many tokens from this address were unknown.
        """
        if self._num_waiting >= _MAX_WAITING:
            metrics.API_REFUSALS.labels("rate_limited").inc()
            raise RateLimitedError(
                "too many requests with unknown tokens arrive at once; send the request again",
                retry_after_s=1.0,
            )
        self._check(peer)
        self._num_waiting += 1
        try:
            async with self._lookups:
                self._check(peer)  # other lookups of this peer may have failed meanwhile
                yield
        except UnauthenticatedError:
            if peer not in self._failed and len(self._failed) >= _MAX_PEERS:
                self._failed.clear()
            self._failed[peer] = (self._num_failed(peer) + 1.0, self._clock())
            raise
        finally:
            self._num_waiting -= 1

    def _check(self, peer: str) -> None:
        over = self._num_failed(peer) + 1.0 - _BURST
        if over > 0:
            metrics.API_REFUSALS.labels("rate_limited").inc()
            raise RateLimitedError(
                f"too many requests with unknown tokens came from {peer}; check the token",
                retry_after_s=over / _PER_SECOND,
                peer=peer,
            )

    def _num_failed(self, peer: str) -> float:
        failed, when = self._failed.get(peer, (0.0, 0.0))
        return max(failed - (self._clock() - when) * _PER_SECOND, 0.0)
