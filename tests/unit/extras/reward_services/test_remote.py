"""Tests of rewards from a service over HTTP or gRPC."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import grpc
import httpx
import pytest

from services.common.runspec.rollout import RewardSpec
from services.extras.reward_services.remote import (
    CircuitBreaker,
    GrpcRewardService,
    HttpRewardService,
    RemoteReward,
)
from services.rollout.calls.outside import AddressPolicy
from services.rollout.calls.pool import CallPool
from services.rollout.failures import BusyError, CallError
from services.rollout.rewards.base import RewardInput, Score
from services.rollout.rewards.scorer import Scorer
from slipstream.reward.v1 import reward_pb2 as pb
from slipstream.reward.v1 import reward_pb2_grpc

GIVEN = RewardInput(prompt="p", response="r", answer="a", row={"x": 1})
URL = "http://127.0.0.1:1/score"


def service(handler: Callable[[httpx.Request], httpx.Response], **changes: object) -> RemoteReward:
    http = HttpRewardService(
        URL, reach=AddressPolicy({"127.0.0.1"}), transport=httpx.MockTransport(handler)
    )
    return RemoteReward(URL, http, concurrency=2, **changes)  # type: ignore[arg-type]


async def test_a_score_is_weighted() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(request.read())
        return httpx.Response(200, json={"score": 0.25})

    bodies: list[bytes] = []
    async with service(handler) as remote, CallPool(1) as pool:
        scorer = Scorer([RewardSpec(name=URL, weight=2.0)], pool, {URL: remote})
        assert await scorer.score(GIVEN) == Score(0.5, {"score": 0.25})
    assert b'"response":"r"' in bodies[0].replace(b" ", b"")


async def test_busy_services_are_asked_again() -> None:
    answers = [httpx.Response(503), httpx.Response(429), httpx.Response(200, json={"score": 1})]
    async with service(lambda _: answers.pop(0)) as remote:
        assert await remote.score(GIVEN, timeout_s=10) == 1


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (httpx.Response(400, text="bad row"), "exception", "400: bad row"),
        (httpx.Response(200, text="hello"), "invalid_value", "hello"),
        (httpx.Response(200, json={"other": 1}), "invalid_value", "other"),
        (httpx.Response(500, text="full"), "timeout", r"0\.3 s: .* 500: full"),
    ],
)
async def test_failures_are_typed(answer: httpx.Response, kind: str, message: str) -> None:
    async with service(lambda _: answer) as remote:
        with pytest.raises(CallError, match=message) as caught:
            await remote.score(GIVEN, timeout_s=0.3)
    assert caught.value.kind == kind


async def test_a_host_that_does_not_resolve_is_named() -> None:
    class Nowhere(AddressPolicy):
        async def resolve(self, host: str, port: int) -> str:
            raise BusyError(f"no {host}")

    url = "http://gone:1/score"
    async with RemoteReward(url, HttpRewardService(url, reach=Nowhere()), concurrency=1) as remote:
        with pytest.raises(CallError, match="no gone") as caught:
            await remote.score(GIVEN, timeout_s=0.1)
    assert caught.value.kind == "timeout"


async def test_a_service_that_keeps_failing_is_left_alone_for_a_while() -> None:
    def handler(_: httpx.Request) -> httpx.Response:
        calls.append(now)
        return httpx.Response(200 if now > 5 else 400, json={"score": 1})

    now = 0.0
    calls: list[float] = []
    breaker = CircuitBreaker(max_failures=3, open_s=10, now=lambda: now)
    async with service(handler, breaker=breaker) as remote:
        for _ in range(6):
            with pytest.raises(CallError):
                await remote.score(GIVEN, timeout_s=1)
        assert len(calls) == 3
        now = 11.0
        assert await asyncio.gather(*[remote.score(GIVEN, timeout_s=1) for _ in range(3)]) == [
            1,
            1,
            1,
        ]


class Judge(reward_pb2_grpc.RewardServiceServicer):
    """Reward service that refuses the first request as busy and every empty response as invalid."""

    def __init__(self) -> None:
        self.requests: list[pb.ScoreResponseRequest] = []

    async def ScoreResponse(self, request, context):
        self.requests.append(request)
        if len(self.requests) == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "loading")
        if not request.response:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "an empty response")
        if request.response == "slow":
            await asyncio.Event().wait()
        if request.response == "bomb":
            context.set_compression(grpc.Compression.Gzip)
            return pb.ScoreResponseResponse(terms={"x" * (16 << 20): 1.0})
        return pb.ScoreResponseResponse(score=0.5)


async def test_a_grpc_service_scores_and_its_failures_are_typed() -> None:
    judge, server = Judge(), grpc.aio.server()
    reward_pb2_grpc.add_RewardServiceServicer_to_server(judge, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    url = f"grpc://127.0.0.1:{port}"
    try:
        async with (
            CallPool(1) as pool,
            RemoteReward(
                url, GrpcRewardService(url, reach=AddressPolicy({"127.0.0.1"})), concurrency=2
            ) as remote,
        ):
            scorer = Scorer([RewardSpec(name=url, weight=2.0)], pool, {url: remote})
            assert (await scorer.score(GIVEN)).value == 1.0
            assert judge.requests[1].answer_json == '"a"'
            assert judge.requests[1].row_json == '{"x": 1}'
            with pytest.raises(CallError, match="INVALID_ARGUMENT: an empty response") as caught:
                await remote.score(replace(GIVEN, response=""), timeout_s=5)
            assert caught.value.kind == "exception"
            with pytest.raises(CallError) as caught:
                await remote.score(replace(GIVEN, response="slow"), timeout_s=0.2)
            assert caught.value.kind == "timeout"
            with pytest.raises(CallError, match="larger than max") as caught:
                await remote.score(replace(GIVEN, response="bomb"), timeout_s=30)
            assert caught.value.kind == "exception"
    finally:
        await server.stop(None)
