"""Tests of gRPC calls: errors arrive as the raised class, and calls have deadlines and bounded retries."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest

from services.common import errors
from services.common.rpc.client import call, open_channel
from services.common.rpc.server import MAX_CALLS, serve
from slipstream.transferqueue.v1 import transferqueue_pb2 as pb
from slipstream.transferqueue.v1 import transferqueue_pb2_grpc


class Servicer(transferqueue_pb2_grpc.TransferQueueServiceServicer):
    def __init__(self, behave):
        self._behave = behave
        self.calls = 0

    async def ReleaseKeys(self, request, context):
        self.calls += 1
        await self._behave()
        return pb.ReleaseKeysResponse(key_count=3)


@asynccontextmanager
async def served(servicer):
    def register(server):
        transferqueue_pb2_grpc.add_TransferQueueServiceServicer_to_server(servicer, server)

    async with (
        serve("127.0.0.1:0", register) as port,
        open_channel(f"127.0.0.1:{port}", "worker") as channel,
    ):
        yield channel


async def ask(behave, *, timeout_s=5.0, idempotent=False):
    servicer = Servicer(behave)
    async with served(servicer) as channel:
        stub = transferqueue_pb2_grpc.TransferQueueServiceStub(channel)
        try:
            answer = await call(
                stub.ReleaseKeys,
                pb.ReleaseKeysRequest(),
                timeout_s=timeout_s,
                idempotent=idempotent,
            )
        except errors.ServiceError as error:
            return error, servicer.calls
    return answer, servicer.calls


@pytest.mark.parametrize(
    "cls",
    [cls for cls in errors.ServiceError.__subclasses__() if cls is not errors.UnavailableError],
    ids=lambda cls: cls.__name__,
)
async def test_an_error_arrives_as_the_class_that_was_raised(cls):
    async def behave():
        raise cls("expected a, got b", key="value")

    error, _ = await ask(behave)
    assert type(error) is cls
    assert str(error) == "expected a, got b"
    assert error.metadata["key"] == "value"
    assert len(error.metadata["trace_id"]) == 32


async def test_an_unforeseen_fault_becomes_internal_and_names_itself():
    async def behave():
        raise KeyError("lost")

    error, _ = await ask(behave)
    assert type(error) is errors.InternalError
    assert "KeyError" in str(error)


async def test_a_silent_peer_ends_in_deadline_exceeded():
    async def behave():
        await asyncio.sleep(30)

    error, _ = await ask(behave, timeout_s=0.2)
    assert type(error) is errors.DeadlineExceededError


async def test_an_unreachable_peer_is_named():
    async with open_channel("127.0.0.1:1", "worker") as channel:
        stub = transferqueue_pb2_grpc.TransferQueueServiceStub(channel)
        with pytest.raises(errors.UnavailableError, match="ReleaseKeys"):
            await call(stub.ReleaseKeys, pb.ReleaseKeysRequest(), timeout_s=2.0)


async def test_calls_beyond_the_limit_of_a_connection_wait_even_if_they_are_not_idempotent():
    servicer = Servicer(lambda: asyncio.sleep(0.1))
    async with served(servicer) as channel:
        stub = transferqueue_pb2_grpc.TransferQueueServiceStub(channel)
        request = pb.ReleaseKeysRequest()
        calls = [call(stub.ReleaseKeys, request, timeout_s=60) for _ in range(3 * MAX_CALLS)]
        await asyncio.gather(*calls)
    assert servicer.calls == 3 * MAX_CALLS


async def test_only_idempotent_calls_are_repeated():
    failures = iter([errors.UnavailableError("not yet"), None])

    async def behave():
        if (error := next(failures)) is not None:
            raise error

    answer, calls = await ask(behave, idempotent=True)
    assert (answer.key_count, calls) == (3, 2)

    async def always():
        raise errors.UnavailableError("never")

    error, calls = await ask(always)
    assert (type(error), calls) == (errors.UnavailableError, 1)


async def test_a_connection_runs_a_limited_number_of_calls_and_the_others_wait():
    running = most = 0
    released = asyncio.Event()

    async def behave():
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == MAX_CALLS:
            asyncio.get_running_loop().call_later(0.2, released.set)
        await released.wait()
        running -= 1

    servicer = Servicer(behave)
    async with served(servicer) as channel:
        ask_release = transferqueue_pb2_grpc.TransferQueueServiceStub(channel).ReleaseKeys
        request = pb.ReleaseKeysRequest()
        # The client receives the server's limit with the first response.
        first = asyncio.ensure_future(call(ask_release, request, timeout_s=60.0))
        await channel.channel_ready()
        await asyncio.sleep(0.5)
        calls = [call(ask_release, request, timeout_s=60.0) for _ in range(MAX_CALLS + 20)]
        await asyncio.gather(first, *calls)
    assert (most, servicer.calls) == (MAX_CALLS, MAX_CALLS + 21)


async def test_a_port_in_use_is_rejected_with_the_fix():
    async with serve("127.0.0.1:0", lambda server: None) as port:
        with pytest.raises(errors.InvalidArgumentError, match="another port"):
            async with serve(f"127.0.0.1:{port}", lambda server: None):
                pass


def test_every_reason_is_unique():
    reasons = [cls.reason for cls in errors.ServiceError.__subclasses__()]
    assert len(set(reasons)) == len(reasons)
    assert all(
        isinstance(cls.code, grpc.StatusCode) for cls in errors.ServiceError.__subclasses__()
    )


def test_the_text_of_an_error_is_its_message():
    error = errors.UnavailableError("it does not answer")
    error.message = f"rollout-1: {error.message}"
    assert str(error) == "rollout-1: it does not answer"
