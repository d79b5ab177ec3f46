"""Reward that a remote service computes, such as a reward model, a judge or a cluster that runs tests."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self

import grpc
import httpx

from services.common.rpc.client import CHANNEL_OPTIONS
from services.common.telemetry import tracing
from services.rollout.calls.outside import AddressPolicy, ExternalService, delays, json_text
from services.rollout.failures import BusyError, CallError
from services.rollout.rewards.base import RewardInput
from slipstream.reward.v1 import reward_pb2 as pb
from slipstream.reward.v1 import reward_pb2_grpc

_FIRST_DELAY_S = 0.2
_MAX_DELAY_S = 5.0


class CircuitBreaker:
    """Refuses calls for a while after many failures in a row, so that a dead service costs no time-outs.

    Args:
        max_failures: Number of failures in a row from which calls are refused.
        open_s: Seconds until calls are tried again.
        now: Returns monotonic seconds.
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
        """True while calls are refused."""
        return self._num_failures >= self._max_failures and self._now() < self._closes_at

    def record(self, *, succeeded: bool) -> None:
        self._num_failures = 0 if succeeded else self._num_failures + 1
        if self._num_failures >= self._max_failures:
            self._closes_at = self._now() + self._open_s


def open_remote_reward(
    url: str, *, reach: AddressPolicy, token: str, concurrency: int
) -> "RemoteReward":
    """Returns a client; see :class:`~services.rollout.rewards.base.OpenRewardService`."""
    is_grpc = url.startswith(("grpc://", "grpcs://"))
    service_type = GrpcRewardService if is_grpc else HttpRewardService
    return RemoteReward(url, service_type(url, reach=reach, token=token), concurrency=concurrency)


class RewardService(Protocol):
    """Remote service that scores responses."""

    async def request_score(
        self, reward_input: RewardInput, episode: Mapping[str, Any] | None
    ) -> Any:
        """Returns the service's score: a number, or terms by name.

        Args:
            episode: Description of the episode, for a service that sees it.

        Raises:
            BusyError: If a retry may succeed.
            CallError: If a retry would fail, too.
        """

    async def close(self) -> None: ...


class RemoteReward:
    """Calls a reward service, and retries until the deadline while it is busy.

    Args:
        url: Name of the service in messages.
        breaker: Circuit breaker; a new one by default.
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
        await self._service.close()

    async def score(
        self,
        reward_input: RewardInput,
        *,
        episode: Mapping[str, Any] | None = None,
        timeout_s: float,
    ) -> Any:
        """Returns the service's score.

        Raises:
            CallError: ``timeout`` after the deadline; ``exception`` if the service refuses, or failed so
                often that calls are suspended; ``invalid_value`` if it returns no score.
        """
        if self._breaker.is_open:
            raise CallError(
                "exception",
                f"{self._url} failed many times in a row; no requests are sent for a while",
            )
        async with self._places:
            try:
                score = await self._ask(reward_input, episode, timeout_s=timeout_s)
            except CallError as error:
                # A service that responds, even with an invalid score, is not down.
                self._breaker.record(succeeded=error.kind == "invalid_value")
                raise
        self._breaker.record(succeeded=True)
        return score

    async def _ask(
        self, reward_input: RewardInput, episode: Mapping[str, Any] | None, *, timeout_s: float
    ) -> Any:
        """Calls the service, and calls it again while it is busy, until the deadline."""
        reason, waits = "it did not respond", delays(_FIRST_DELAY_S, _MAX_DELAY_S)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        return await self._service.request_score(reward_input, episode)
                    except BusyError as error:
                        reason = str(error)
                    await asyncio.sleep(next(waits))
        except TimeoutError as error:
            message = f"{self._url} gave no score within {timeout_s:g} s: {reason}"
            raise CallError("timeout", message) from error


class HttpRewardService:
    """Posts ``{"prompt", "response", "answer", "row"}`` and expects ``{"score": number}``.

    The score may be terms by name. With ``sees_episode``, the body also has ``episode``. Responses
    429 and 5xx and broken connections are retried.

    Args:
        transport: Replaces the network in tests.
    """

    def __init__(
        self,
        url: str,
        *,
        reach: AddressPolicy,
        token: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = url
        self._service = ExternalService(url, reach=reach, token=token, transport=transport)

    async def close(self) -> None:
        await self._service.close()

    async def request_score(
        self, reward_input: RewardInput, episode: Mapping[str, Any] | None
    ) -> Any:
        body = {
            "prompt": reward_input.prompt,
            "response": reward_input.response,
            "answer": reward_input.answer,
            "row": dict(reward_input.row),
        }
        if episode is not None:
            body["episode"] = dict(episode)
        try:
            response = await self._service.post(body)
        except httpx.TransportError as error:
            raise BusyError(f"it does not respond ({error!r})") from error
        if response.status_code == 429 or response.status_code >= 500:
            raise BusyError(f"it returned status {response.status_code}: {response.text[:200]}")
        if not response.is_success:
            raise CallError(
                "exception",
                f"{self._url} returned status {response.status_code}: {response.text[:200]}",
            )
        try:
            return response.json()["score"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CallError(
                "invalid_value",
                f'{self._url} must return {{"score": number or terms}}, got {response.text[:200]}',
            ) from error


_MAX_ANSWER_BYTES = 1 << 20
# Without decompression, the limit applies to the received bytes.
_OPTIONS = dict(CHANNEL_OPTIONS) | {
    "grpc.max_receive_message_length": _MAX_ANSWER_BYTES,
    "grpc.compression_enabled_algorithms_bitset": 1,
}
_BUSY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})


class GrpcRewardService:
    """Calls ``ScoreResponse``. UNAVAILABLE and RESOURCE_EXHAUSTED are retried.

    The channel presents no client certificate of this process, because the service may belong to a
    third party.

    Args:
        url: ``grpc://host:port``, or ``grpcs://host:port`` for TLS with the system's certificate authorities.
        token: Bearer token, sent with each call.
    """

    def __init__(self, url: str, *, reach: AddressPolicy, token: str = "") -> None:
        self._url = httpx.URL(url)
        self._reach = reach
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._channel: grpc.aio.Channel | None = None

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def request_score(
        self, reward_input: RewardInput, episode: Mapping[str, Any] | None
    ) -> Any:
        request = pb.ScoreResponseRequest(
            prompt=reward_input.prompt,
            response=reward_input.response,
            answer_json=json_text(reward_input.answer),
            row_json=json_text(reward_input.row),
            episode_json="" if episode is None else json_text(episode),
        )
        stub = reward_pb2_grpc.RewardServiceStub(await self._connected())
        try:
            # RemoteReward enforces the deadline; cancelling this coroutine cancels the call.
            headers = {**self._headers, **tracing.headers()}
            answer = await stub.ScoreResponse(request, metadata=tuple(headers.items()))
        except grpc.aio.AioRpcError as error:
            # gRPC uses one code for a busy service and for a response that exceeds this side's
            # limit.
            is_too_large = "larger than max" in (error.details() or "")
            cause = f"returned {error.code().name}: {error.details()}"
            if error.code() in _BUSY and not is_too_large:
                raise BusyError(f"it {cause}") from error
            raise CallError("exception", f"{self._url} {cause}") from error
        return dict(answer.terms) or answer.score

    async def _connected(self) -> grpc.aio.Channel:
        """Returns a channel to the checked address, with the URL's host as authority."""
        if self._channel is not None:
            return self._channel
        if not self._url.host or self._url.port is None:
            raise CallError("exception", f"{self._url} needs a host and a port: grpc://host:port")
        address = await self._reach.resolve(self._url.host, self._url.port)
        family = "ipv6" if ":" in address else "ipv4"
        target = f"{family}:{f'[{address}]' if family == 'ipv6' else address}:{self._url.port}"
        options = (*_OPTIONS.items(), ("grpc.default_authority", self._url.netloc.decode()))
        if self._url.scheme == "grpcs":
            self._channel = grpc.aio.secure_channel(
                target,
                grpc.ssl_channel_credentials(),
                options=(*options, ("grpc.ssl_target_name_override", self._url.host)),
            )
        else:
            self._channel = grpc.aio.insecure_channel(target, options=options)
        return self._channel
