"""How much of the API a project may use at once: requests a second, and open streams.

Each controller counts what comes to it, in memory.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from services.common.errors import ResourceExhaustedError
from services.controller import metrics
from services.controller.settings import Limits

# Seconds whose requests may come at once.
_BURST_S = 2.0
# Limits that somebody changes hold after this time.
_KNOWN_FOR_S = 5.0
# A stream ends when somebody closes it, which nobody can foretell.
_STREAM_RETRY_S = 10.0


class RateLimitedError(ResourceExhaustedError):
    """The project sends too many requests."""

    reason = "RATE_LIMITED"


class TooManyStreamsError(ResourceExhaustedError):
    """The project has too many streams open."""

    reason = "TOO_MANY_STREAMS"


@dataclass(slots=True)
class _Bucket:
    """Requests that a project may send now."""

    limits: Limits
    read_time: float
    tokens: float
    fill_time: float


class RequestLimits:
    """Admits requests and streams. Belongs to the event loop's thread.

    Args:
        limits_of: Finds the limits of a project.
        clock: Seconds.
    """

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
        """Take a request in.

        Raises:
            RateLimitedError: If too many came before it.
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
                f"project {project!r} may send {rate} requests a second; send fewer",
                retry_after_s=(1.0 - bucket.tokens) / rate,
                project=project,
            )
        bucket.tokens -= 1.0

    @contextmanager
    def stream(self, project: str) -> Iterator[None]:
        """A stream of a project whose request was admitted, open until the block ends.

        Raises:
            TooManyStreamsError: If as many are open as may be.
        """
        limit = self._buckets[project].limits.max_event_streams
        if limit and self._streams[project] >= limit:
            metrics.API_REFUSALS.labels("too_many_streams").inc()
            raise TooManyStreamsError(
                f"project {project!r} has {limit} streams open, as many as it may; close one",
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
        """Streams of a project that are open here."""
        return self._streams[project]

    async def _bucket(self, project: str) -> _Bucket:
        now, bucket = self._clock(), self._buckets.get(project)
        if bucket is None or now - bucket.read_time > _KNOWN_FOR_S:
            limits = await self._limits_of(project)
            bucket = self._buckets.get(project)
            if bucket is None:
                full = limits.max_requests_per_second * _BURST_S
                bucket = self._buckets[project] = _Bucket(limits, now, full, now)
            bucket.limits, bucket.read_time = limits, now
        return bucket
