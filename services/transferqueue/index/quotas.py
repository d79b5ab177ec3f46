"""Byte quotas of runs and their use."""

from collections import Counter

from services.common.clock import Clock
from services.common.errors import InvalidArgumentError, ResourceExhaustedError
from services.transferqueue.concurrency import Waiters


class Quotas:
    """Byte accounts of runs; only the shards limit a run without a quota.

    Args:
        clock: Clock for waits.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiters = Waiters()
        self._limits: Counter[str] = Counter()
        self._used: Counter[str] = Counter()

    def raise_to(self, run: str, quota_bytes: int) -> None:
        """Raises the quota of a run to at least ``quota_bytes``; 0 sets no quota."""
        self._limits[run] = max(self._limits[run], quota_bytes)
        self._waiters.wake(run)

    def forget(self, run: str) -> None:
        """Drops the quota of an ended run."""
        del self._limits[run]

    def limit(self, run: str) -> int:
        """Returns the quota of a run in bytes; 0 without a quota."""
        return self._limits[run]

    async def take(self, run: str, size_bytes: int, *, wait_s: float) -> None:
        """Charges a run; waits until there is space.

        Raises:
            ResourceExhaustedError: If there was no space in time.
            InvalidArgumentError: If the size alone exceeds the quota.
        """
        deadline = self._clock.monotonic() + wait_s
        while True:
            limit, used = self._limits[run], self._used[run]
            if not limit or used + size_bytes <= limit:
                self._used[run] += size_bytes
                return
            if size_bytes > limit:
                raise InvalidArgumentError(
                    f"a put of {size_bytes} bytes exceeds the whole quota of {run}, {limit} bytes; "
                    "raise quota_bytes or store fewer samples at once",
                    run=run,
                )
            rest_s = deadline - self._clock.monotonic()
            if rest_s <= 0:
                raise ResourceExhaustedError(
                    f"quota of {run}: {used} of {limit} bytes are in use and {size_bytes} more did "
                    f"not fit within {wait_s} s; release samples or raise the quota",
                    run=run,
                    used_bytes=used,
                    quota_bytes=limit,
                )
            await self._waiters.wait(run, timeout_s=rest_s)

    def credit(self, run: str, size_bytes: int) -> None:
        """Credits a run and wakes its waiting puts."""
        self._used[run] -= size_bytes
        self._waiters.wake(run)
