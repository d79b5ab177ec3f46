"""Tests that a client's connection to a shard matches responses to requests."""

import asyncio
from collections.abc import Sequence

import pytest
import zmq

from services.common.errors import DeadlineExceededError, UnavailableError
from services.wire.data.encoding import codec
from services.wire.data.transport.connection import ShardConnection
from services.wire.transferqueue.types import Shard

SHARD = Shard(shard_id="s", endpoint="tcp://127.0.0.1:1", public_key="", instance_id="i")


class FakeChannel:
    """Fake channel that records sent messages."""

    def __init__(self) -> None:
        self.sent: list[tuple[codec.Message, int]] = []
        self.is_closed = False

    def send(self, frames: Sequence[bytes | memoryview], *, copy: bool = True) -> None:
        self.sent.append(codec.decode(frames[0]))

    def close(self) -> None:
        self.is_closed = True


def connection() -> tuple[ShardConnection, FakeChannel]:
    shard_connection, channel = ShardConnection(SHARD), FakeChannel()
    shard_connection._channel = channel
    return shard_connection, channel


def answer(to: ShardConnection, message: codec.Response, request_id: int) -> None:
    to._on_message([memoryview(codec.encode(message, request_id))])


async def test_a_late_answer_is_not_taken_for_the_answer_to_the_next_request() -> None:
    asker, channel = connection()
    with pytest.raises(DeadlineExceededError, match="Read"):
        await asker.request(codec.Read((1, 0, 8), in_arena=True), timeout_s=0.0)
    asking = asyncio.ensure_future(
        asker.request(codec.Read((2, 0, 8), in_arena=True), timeout_s=30)
    )
    await asyncio.sleep(0)
    (_, first), (_, second) = channel.sent
    answer(asker, codec.Located(7, (64,)), first)
    assert not asking.done()
    assert channel.sent[-1] == (codec.Unpin(7), 0), "what the late answer holds is let go"
    answer(asker, codec.Located(8, (128,)), second)
    assert await asking == (codec.Located(8, (128,)), [])


async def test_an_answer_that_comes_twice_counts_once() -> None:
    asker, channel = connection()
    asking = asyncio.ensure_future(
        asker.request(codec.Read((1, 0, 8), in_arena=True), timeout_s=30)
    )
    await asyncio.sleep(0)
    ((_, request_id),) = channel.sent
    answer(asker, codec.Located(1, (64,)), request_id)
    answer(asker, codec.Located(2, (0,)), request_id)
    assert await asking == (codec.Located(1, (64,)), [])
    assert channel.sent[-1] == (codec.Unpin(2), 0)


async def test_an_invalid_message_closes_the_connection_and_fails_waiting_requests() -> None:
    asker, channel = connection()
    asking = asyncio.ensure_future(
        asker.request(codec.Read((1, 0, 8), in_arena=True), timeout_s=30)
    )
    await asyncio.sleep(0)
    asker._on_message([memoryview(b"garbage")])
    with pytest.raises(UnavailableError, match="shard s"):
        await asking
    assert not asker.is_open
    assert channel.is_closed


async def test_a_lost_connection_over_the_network_fails_waiting_requests() -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    shard = Shard(shard_id="s", endpoint=f"tcp://127.0.0.1:{port}", public_key="", instance_id="i")
    asker = ShardConnection.over_network(context, shard, zmq.curve_keypair())
    asking = asyncio.ensure_future(
        asker.request(codec.Read((1, 0, 8), in_arena=True), timeout_s=30)
    )
    while not await asyncio.to_thread(router.poll, 10):
        assert not asking.done()
    assert asker.is_connected
    router.close(linger=0)
    with pytest.raises(UnavailableError, match=shard.endpoint):
        await asking
    assert not (asker.is_open or asker.is_connected)
    asker.close()
    context.destroy(linger=0)
