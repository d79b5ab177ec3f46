"""A reward service over gRPC: ``slipstream.reward.v1.RewardService``."""

import json
from collections.abc import Mapping
from typing import Any

import grpc
import httpx

from services.common import tracing
from services.common.grpc_client import CHANNEL_OPTIONS
from services.rollout.calls.reach import Reach
from services.rollout.failures import BusyError, CallError
from services.rollout.rewards.base import RewardInput
from slipstream.reward.v1 import reward_pb2 as pb
from slipstream.reward.v1 import reward_pb2_grpc

_MAX_ANSWER_BYTES = 1 << 20
# Nothing is decompressed: the limit is on what came.
_OPTIONS = dict(CHANNEL_OPTIONS) | {
    "grpc.max_receive_message_length": _MAX_ANSWER_BYTES,
    "grpc.compression_enabled_algorithms_bitset": 1,
}
_BUSY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})


class GrpcRewardService:
    """Calls ``ScoreResponse``. UNAVAILABLE and RESOURCE_EXHAUSTED are worth another try.

    This process's identity is not shown: the service may be anybody's.

    Args:
        url: ``grpc://host:port``, or ``grpcs://host:port`` for TLS with the system's authorities.
        reach: Where it may be.
        token: Is shown to the service with each call.
    """

    def __init__(self, url: str, *, reach: Reach, token: str = "") -> None:
        self._url = httpx.URL(url)
        self._reach = reach
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._channel: grpc.aio.Channel | None = None

    async def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            await self._channel.close()

    async def ask(self, given: RewardInput, episode: Mapping[str, Any] | None) -> Any:
        """Return what the service gives as score."""
        request = pb.ScoreResponseRequest(
            prompt=given.prompt,
            response=given.response,
            answer_json=json.dumps(given.answer, default=str),
            row_json=json.dumps(dict(given.row), default=str),
            episode_json="" if episode is None else json.dumps(episode),
        )
        stub = reward_pb2_grpc.RewardServiceStub(await self._connected())
        try:
            # RemoteReward holds the deadline; cancelling this cancels the call.
            headers = {**self._headers, **tracing.headers()}
            answer = await stub.ScoreResponse(request, metadata=tuple(headers.items()))
        except grpc.aio.AioRpcError as error:
            # gRPC has one code for a busy service and for an answer that is over the limit of this side.
            is_too_large = "larger than max" in (error.details() or "")
            if error.code() in _BUSY and not is_too_large:
                raise BusyError from error
            raise CallError(
                "exception", f"{self._url} answered {error.code().name}: {error.details()}"
            ) from error
        return dict(answer.terms) or answer.score

    async def _connected(self) -> grpc.aio.Channel:
        """A channel to the address that was checked, as to the host of the URL."""
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
