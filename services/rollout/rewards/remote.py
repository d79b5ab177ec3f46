"""A reward that another service computes: a reward model, a judge, a farm of test machines."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self

from services.rollout.failures import BusyError, CallError
from services.rollout.rewards.base import RewardInput

_FIRST_DELAY_S = 0.2
_LONGEST_DELAY_S = 5.0


class CircuitBreaker:
    """Refuses calls for a while after many failures in a row, so that a dead service costs no deadlines.

    Args:
        max_failures: Failures in a row that open it.
        open_s: Seconds until one call may try again.
        now: Monotonic seconds.
    """

    def __init__(
        self,
        max_failures: int = 10,
        open_s: float = 10.0,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_failures = max_failures
        self._open_s = open_s
        self._now = now
        self._num_failures = 0
        self._closes_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether calls are refused now."""
        return self._num_failures >= self._max_failures and self._now() < self._closes_at

    def record(self, *, succeeded: bool) -> None:
        """Count the end of a call."""
        self._num_failures = 0 if succeeded else self._num_failures + 1
        if self._num_failures >= self._max_failures:
            self._closes_at = self._now() + self._open_s


class RewardService(Protocol):
    """Another process that scores."""

    async def ask(self, given: RewardInput, episode: Mapping[str, Any] | None) -> Any:
        """Return what the service gives as score: a number, or terms by name.

        Args:
            given: The response.
            episode: The whole episode, for a service that sees it.

        Raises:
            BusyError: If another try may succeed.
            CallError: If not.
        """
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


class RemoteReward:
    """Asks a service, again while it is busy, until the deadline.

    Args:
        url: Names the service in messages.
        service: Is asked.
        concurrency: Most calls at once.
        breaker: Remembers failures.
    """

    def __init__(
        self,
        url: str,
        service: RewardService,
        *,
        concurrency: int,
        breaker: CircuitBreaker | None = None,
    ) -> None:
        self._url = url
        self._service = service
        self._places = asyncio.Semaphore(concurrency)
        self._breaker = breaker or CircuitBreaker()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections."""
        await self._service.close()

    async def score(
        self, given: RewardInput, *, episode: Mapping[str, Any] | None = None, timeout_s: float
    ) -> Any:
        """Return what the service answered as score.

        Raises:
            CallError: ``timeout`` past the deadline; ``exception`` if the service refuses or failed so often
                that it is left alone for a while; ``invalid_value`` if it answers no score.
        """
        if self._breaker.is_open:
            raise CallError(
                "exception", f"{self._url} failed many times in a row and is left alone for a while"
            )
        async with self._places:
            try:
                async with asyncio.timeout(timeout_s):
                    score = await self._ask(given, episode)
            except TimeoutError as error:
                self._breaker.record(succeeded=False)
                raise CallError(
                    "timeout", f"{self._url} gave no answer in {timeout_s:g} s"
                ) from error
            except CallError as error:
                # A service that answers, if only with nonsense, is not down.
                self._breaker.record(succeeded=error.kind == "invalid_value")
                raise
        self._breaker.record(succeeded=True)
        return score

    async def _ask(self, given: RewardInput, episode: Mapping[str, Any] | None) -> Any:
        """Ask until there is an answer that another try would not change."""
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                return await self._service.ask(given, episode)
            except BusyError:
                await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))  # noqa: S311 -- jitter
                delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
