"""A reward that another service computes: a reward model, a judge, a farm of test machines."""

import asyncio
import random
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import httpx

from services.rollout.failures import CallError
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


class RemoteReward:
    """Posts ``{"prompt", "response", "answer", "row"}`` and expects ``{"score": number}``.

    Answers 429 and 5xx and broken connections are tried again until the deadline.

    Args:
        url: ``http://`` or ``https://``.
        concurrency: Most calls at once.
        breaker: Remembers failures.
        transport: Replaces the network in tests.
    """

    def __init__(
        self,
        url: str,
        *,
        concurrency: int,
        breaker: CircuitBreaker | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = url
        self._places = asyncio.Semaphore(concurrency)
        self._breaker = breaker or CircuitBreaker()
        self._http = httpx.AsyncClient(transport=transport, timeout=None)  # noqa: S113 -- see score

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def score(self, given: RewardInput, *, timeout_s: float) -> Any:
        """Return what the service answered as score.

        Raises:
            CallError: ``timeout`` past the deadline; ``exception`` if the service refuses, answers no
                score, or failed so often that it is left alone for a while.
        """
        if self._breaker.is_open:
            raise CallError(
                "exception", f"{self._url} failed many times in a row and is left alone for a while"
            )
        body = {
            "prompt": given.prompt,
            "response": given.response,
            "answer": given.answer,
            "row": dict(given.row),
        }
        async with self._places:
            try:
                async with asyncio.timeout(timeout_s):
                    response = await self._post(body)
            except TimeoutError as error:
                self._breaker.record(succeeded=False)
                raise CallError(
                    "timeout", f"{self._url} gave no answer in {timeout_s:g} s"
                ) from error
        self._breaker.record(succeeded=response.is_success)
        if not response.is_success:
            raise CallError(
                "exception",
                f"{self._url} answered {response.status_code}: {response.text[:200]}",
            )
        try:
            return response.json()["score"]
        except (ValueError, KeyError, TypeError) as error:
            raise CallError(
                "invalid_value",
                f'{self._url} must answer {{"score": number}}, but answered {response.text[:200]}',
            ) from error

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        """Post until there is an answer that another try would not change."""
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                response = await self._http.post(self._url, json=body)
            except httpx.TransportError:
                response = None
            if response is not None and response.status_code != 429 and response.status_code < 500:
                return response
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))  # noqa: S311 -- jitter
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
