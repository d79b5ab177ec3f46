"""A reward service over gRPC: ``slipstream.reward.v1.RewardService``."""

import json
from typing import Any

import grpc

from services.common.grpc_client import CHANNEL_OPTIONS
from services.rollout.failures import CallError
from services.rollout.rewards.base import RewardInput
from services.rollout.rewards.remote import BusyError
from slipstream.reward.v1 import reward_pb2 as pb
from slipstream.reward.v1 import reward_pb2_grpc

_TLS, _PLAIN = "grpcs://", "grpc://"
_BUSY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})


class GrpcRewardService:
    """Calls ``ScoreResponse``. UNAVAILABLE and RESOURCE_EXHAUSTED are worth another try.

    This process's identity is not shown: the service may be anybody's.

    Args:
        url: ``grpc://host:port``, or ``grpcs://host:port`` for TLS with the system's authorities.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        if url.startswith(_TLS):
            self._channel = grpc.aio.secure_channel(
                url.removeprefix(_TLS), grpc.ssl_channel_credentials(), options=CHANNEL_OPTIONS
            )
        else:
            self._channel = grpc.aio.insecure_channel(
                url.removeprefix(_PLAIN), options=CHANNEL_OPTIONS
            )
        self._stub = reward_pb2_grpc.RewardServiceStub(self._channel)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def ask(self, given: RewardInput) -> Any:
        """Return what the service gives as score."""
        request = pb.ScoreResponseRequest(
            prompt=given.prompt,
            response=given.response,
            answer_json=json.dumps(given.answer, default=str),
            row_json=json.dumps(dict(given.row), default=str),
        )
        try:
            # RemoteReward holds the deadline; cancelling this cancels the call.
            answer = await self._stub.ScoreResponse(request)
        except grpc.aio.AioRpcError as error:
            if error.code() in _BUSY:
                raise BusyError from error
            raise CallError(
                "exception", f"{self._url} answered {error.code().name}: {error.details()}"
            ) from error
        return answer.score
