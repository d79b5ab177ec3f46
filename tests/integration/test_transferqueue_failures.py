"""Failures of the transferqueue and its clients: recovery, deadlines, error classes.

Other tests of this folder cover released keys, conflicting types, full queues, dead shards and unknown
clients on an encrypted socket; the tests of the samplers cover mixed-up groups.
"""

import asyncio
import random
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
import zmq

from services.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    UnavailableError,
)
from services.common.rpc.client import call
from services.transferqueue import metrics
from services.transferqueue.__main__ import transferqueue
from services.transferqueue.index.index import Index
from services.transferqueue.settings import TransferQueueSettings
from services.transferqueue.storage.dataplane import DataPlane
from services.wire.batch import KVBatchMeta
from services.wire.data.channels.arena_socket import open_arena
from services.wire.data.client import DataClient
from services.wire.data.encoding import codec
from services.wire.transferqueue.client import TransferQueueClient
from services.wire.transferqueue.types import AcquireRequest

TRAIN = "run_1/train"


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with transferqueue(TransferQueueSettings(capacity_bytes=1 << 22)) as bound:
        async with TransferQueueClient.connect(bound) as metadata:
            await metadata.create_partition(TRAIN, required_fields=["tokens"])
        yield bound


def request(num_keys: int, **changes: float) -> AcquireRequest:
    return AcquireRequest(
        partition_id=TRAIN, consumer="c", fields=("tokens",), num_keys=num_keys, **changes
    )


def remove_sockets(folder: Path) -> None:
    for path in folder.glob("*.sock"):
        path.unlink()


async def put(data: DataClient, *keys: str) -> KVBatchMeta:
    return await data.put(TRAIN, keys, {"tokens": torch.zeros(len(keys), 4)})


async def test_a_dead_service_is_an_error_and_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(call.__kwdefaults__, "timeout_s", 0.5)
    async with transferqueue(TransferQueueSettings(capacity_bytes=1 << 20)) as address:
        pass
    async with TransferQueueClient.connect(address) as metadata:
        with pytest.raises((UnavailableError, DeadlineExceededError)):
            await metadata.stats()


async def test_a_waiting_consumer_does_not_block_others(address: str) -> None:
    async with (
        TransferQueueClient.connect(address) as patient,
        TransferQueueClient.connect(address) as second_client,
        DataClient.connect(address) as data,
        asyncio.TaskGroup() as tasks,
    ):
        waiting = tasks.create_task(patient.acquire(request(2, wait_s=20.0)))
        await put(data, "a")
        await second_client.stats()
        assert not waiting.done()
        await put(data, "b")
        batch = await waiting
        assert batch.keys == ("a", "b")


async def test_leases_of_a_dead_consumer_are_delivered_again(address: str) -> None:
    async with DataClient.connect(address) as data:
        await put(data, "a", "b")
        async with TransferQueueClient.connect(address) as dead:
            lease = await dead.acquire(request(2, lease_s=0.1))
        async with TransferQueueClient.connect(address) as next_one:
            again = await next_one.acquire(request(2, wait_s=10.0))
            assert again.keys == lease.keys
            with pytest.raises(FailedPreconditionError, match="expired"):
                await next_one.ack(lease)
            await next_one.ack(again)


async def test_a_put_that_cannot_become_visible_is_an_error_and_leaves_nothing(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: Index, meta: KVBatchMeta, *, put_id: str) -> int:
        raise FailedPreconditionError("the index is broken")

    async with (
        DataClient.connect(address) as data,
        TransferQueueClient.connect(address) as metadata,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Index, "commit", fail)
            with pytest.raises(FailedPreconditionError, match="broken"):
                await put(data, "a")
        stats = await metadata.stats()
        assert (stats.partitions[0].num_keys, stats.shards[0].stored_bytes) == (0, 0)
        await put(data, "a")


async def test_malformed_messages_are_refused_and_counted_without_harm(address: str) -> None:
    async with DataClient.connect(address) as data:
        meta = await put(data, "a")
        before = metrics.REJECTED.labels("data", "malformed")._value.get()
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.connect(data.shards[0].endpoint)
        write = codec.encode(codec.Write(1, 0), 1)
        unpin = codec.encode(codec.Unpin(1), 1)
        reads = codec.encode(codec.Read((1, 0, 1 << 40), in_arena=False), 1)
        messages = [[b""], [b"\x01\xff"], [b"x" * 5000], [write], [unpin, b"extra"], [write, b"?"]]
        for message in messages:
            stranger.send_multipart(message)
        stranger.send(reads)
        fetched = await data.get(meta, ["tokens"])
        assert fetched["tokens"].values.shape == (4,)
        await put(data, "b")
        async with asyncio.timeout(30):
            while metrics.REJECTED.labels("data", "malformed")._value.get() < before + 6:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        stranger.close(linger=0)
        context.term()


async def test_a_frame_above_the_limit_ends_the_connection_and_nothing_else(address: str) -> None:
    async with DataClient.connect(address) as data:
        meta = await put(data, "a")
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.connect(data.shards[0].endpoint)
        stranger.send(bytes(codec.MAX_HEADER_BYTES + 1))
        await data.get(meta, ["tokens"])
        stranger.close(linger=0)
        context.term()


@pytest.mark.parametrize(
    "sent", [b"\xff" * 12, struct.pack("<Iq", 4, -1) + b"junk", struct.pack("<Iq", 4, 8) + b"cut"]
)
async def test_what_breaks_a_connection_of_this_host_harms_no_other(
    address: str, sent: bytes
) -> None:
    async with DataClient.connect(address) as data:
        meta = await put(data, "a")
        (shard,) = data.shards
        opened = await asyncio.to_thread(
            open_arena, shard.arena_socket, instance_id=shard.instance_id
        )
        assert opened is not None
        memory, stranger = opened
        with memory, stranger:
            stranger.sendall(sent)
            fetched = await data.get(meta, ["tokens"])
        assert fetched["tokens"].values.shape == (4,)
        await put(data, "b")


async def test_a_connection_that_breaks_is_opened_again(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted: list[socket.socket] = []
    open_local = DataPlane._open_local

    async def listen(self: DataPlane, peer: socket.socket) -> None:
        accepted.append(peer)
        await open_local(self, peer)

    monkeypatch.setattr(DataPlane, "_open_local", listen)
    async with DataClient.connect(address) as data:
        meta = await put(data, "a")
        accepted[0].shutdown(socket.SHUT_RDWR)
        await put(data, "b")
        fetched = await asyncio.gather(*(data.get(meta, ["tokens"]) for _ in range(3)))
        assert all(fields["tokens"].values.shape == (4,) for fields in fetched)
        await put(data, "c")
    assert len(accepted) == 2


async def test_a_shard_whose_unix_socket_was_removed_is_reached_over_the_network(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "longer than the address of a unix socket".ljust(120, "x")
    folder.mkdir()
    settings = TransferQueueSettings(capacity_bytes=1 << 22, arena_folder=folder)
    async with (
        transferqueue(settings) as address,
        TransferQueueClient.connect(address) as metadata,
        DataClient.connect(address) as data,
    ):
        await metadata.create_partition(TRAIN, required_fields=["tokens"])
        meta = await put(data, "a")
        remove_sockets(folder)
        link = await data._links.to("shard-0")
        link.connection.close()
        fetched = await data.get(meta, ["tokens"])
        assert fetched["tokens"].values.shape == (4,)
        await put(data, "b")
    assert caplog.text.count("connecting over the network") == 1


async def test_errors_leave_the_client_as_they_are(address: str) -> None:
    with pytest.raises(DeadlineExceededError, match="mine"):
        async with DataClient.connect(address):
            raise DeadlineExceededError("mine")


async def test_a_cancelled_put_frees_its_memory(address: str) -> None:
    async with (
        DataClient.connect(address, use_shared_memory=False) as data,
        TransferQueueClient.connect(address) as metadata,
    ):
        big = {"tokens": torch.zeros(1, 1 << 19)}
        putting = asyncio.ensure_future(data.put(TRAIN, ["a"], big))
        while not (await metadata.stats()).shards[0].stored_bytes and not putting.done():  # noqa: ASYNC110
            await asyncio.sleep(0)
        putting.cancel()
        await asyncio.wait([putting])
        async with asyncio.timeout(30):
            while (await metadata.stats()).shards[0].stored_bytes:
                await metadata.release(TRAIN, ["a"])


@pytest.mark.parametrize("use_shared_memory", [True, False])
async def test_cancelled_puts_and_gets_leave_nothing_behind(
    address: str, use_shared_memory: bool
) -> None:
    rng = random.Random(0)
    async with (
        TransferQueueClient.connect(address) as metadata,
        DataClient.connect(address, use_shared_memory=use_shared_memory) as data,
    ):
        for number in range(40):
            values = torch.full((4, 30_000), number, dtype=torch.int32)
            keys = [f"g{number}.{member}" for member in range(4)]
            meta = await data.put(TRAIN, keys, {"tokens": values})
            works = [
                data.get(meta, ["tokens"]),
                data.put(TRAIN, [f"x{number}"], {"tokens": torch.zeros(1, 200_000)[:, :1]}),
                data.put(TRAIN, [f"y{number}"], {"tokens": values.reshape(1, -1)}),
            ]
            for work in works:
                task = asyncio.ensure_future(work)
                await asyncio.sleep(rng.random() * 0.004)
                task.cancel()
                await asyncio.wait([task])
            fetched = await data.get(meta, ["tokens"])
            assert torch.equal(fetched["tokens"].values, values.reshape(-1))
            del fetched
            await metadata.release(TRAIN, [*keys, f"x{number}", f"y{number}"])
        remaining_meta = await metadata.get_batch(TRAIN)
        await metadata.release(TRAIN, remaining_meta.keys)
        async with asyncio.timeout(30):
            while (await metadata.stats()).shards[0].stored_bytes:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
