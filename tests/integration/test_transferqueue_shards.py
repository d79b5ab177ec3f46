"""Several shards: placement, loss, encryption, snapshots, disk."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
import zmq

from services.common.errors import (
    AlreadyExistsError,
    DataLossError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from services.common.rpc.client import open_channel
from services.transferqueue.__main__ import transferqueue
from services.transferqueue.settings import TransferQueueSettings
from services.wire.batch import BlobRef, KVBatchMeta
from services.wire.data.client import DataClient
from services.wire.data.encoding import codec
from services.wire.data.encoding.packing import pack
from services.wire.data.transport.connection import ShardConnection
from services.wire.data.transport.links import Links
from services.wire.transferqueue.client import ShardRegistryClient, TransferQueueClient
from services.wire.transferqueue.types import AcquireRequest, Shard

TRAIN = "run_1/train"
MIB = 1 << 20


def settings(folder: Path, **changes: object) -> TransferQueueSettings:
    return TransferQueueSettings(
        capacity_bytes=4 * MIB, snapshot_folder=folder, spill_folder=folder, **changes
    )


@asynccontextmanager
async def service(
    config: TransferQueueSettings, *, use_shared_memory: bool = False
) -> AsyncIterator[tuple[str, TransferQueueClient, DataClient]]:
    async with (
        transferqueue(config) as address,
        TransferQueueClient.connect(address) as metadata,
        DataClient.connect(address, put_timeout_s=0.1, use_shared_memory=use_shared_memory) as data,
    ):
        await metadata.create_partition(TRAIN, required_fields=["tokens"])
        yield address, metadata, data


def tokens(*groups: int) -> list[torch.Tensor]:
    return [torch.full((8,), group, dtype=torch.int32) for group in groups]


async def until(is_reached: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await is_reached():  # noqa: ASYNC110  another process changes the state
            await asyncio.sleep(0.01)


async def until_shards(data: DataClient, count: int) -> None:
    async def is_reached() -> bool:
        return len(data.shards) == count

    await until(is_reached)


async def stored_bytes(metadata: TransferQueueClient) -> int:
    return sum(shard.stored_bytes for shard in (await metadata.stats()).shards)


async def test_groups_are_spread_over_shards_and_read_in_order(tmp_path: Path) -> None:
    async with service(settings(tmp_path)) as (address, metadata, data):
        second_settings = settings(tmp_path, index_address=address, shard_id="shard-1")
        async with transferqueue(second_settings):
            await until_shards(data, 2)
            keys = [f"g{n}.{m}" for n in range(16) for m in range(2)]
            values = tokens(*[n for n in range(16) for _ in range(2)])
            meta = await data.put(TRAIN, keys, {"tokens": values})
            assert {blob.shard_id for blob in meta.blobs} == {"shard-0", "shard-1"}
            assert meta.keys == tuple(keys)
            fetched = await data.get(meta, ["tokens"])
            assert all(map(torch.equal, fetched["tokens"].unbind(), values))
            column = meta.column("tokens")
            for group in range(16):
                places = {column.blob_indexes[2 * group + m] for m in range(2)}
                assert len(places) == 1
            assert await metadata.release(TRAIN, keys) == 32

            async def is_empty() -> bool:
                return await stored_bytes(metadata) == 0

            await until(is_empty)


async def test_a_dead_shard_is_noticed_and_its_unacknowledged_keys_are_reported(
    tmp_path: Path,
) -> None:
    async with service(settings(tmp_path)) as (address, metadata, data):
        second_settings = settings(tmp_path, index_address=address, shard_id="shard-1")
        keys = [f"g{n}.0" for n in range(16)]
        async with transferqueue(second_settings):
            await until_shards(data, 2)
            meta = await data.put(TRAIN, keys, {"tokens": tokens(*range(16))})
            column = meta.column("tokens")
            lost_keys = {
                key
                for key, index in zip(keys, column.blob_indexes, strict=True)
                if meta.blobs[index].shard_id == "shard-1"
            }
        loss = await anext(metadata.watch_lost_samples(TRAIN))
        assert set(loss.keys) == lost_keys
        assert loss.shard_id == "shard-1"
        await until_shards(data, 1)
        with pytest.raises(NotFoundError, match="shard-1"):
            await data.get(meta, ["tokens"])
        rest = await metadata.get_batch(TRAIN)
        assert set(rest.keys) == set(keys) - lost_keys
        await data.get(rest, ["tokens"])
        await data.put(TRAIN, sorted(lost_keys), {"tokens": tokens(*range(len(lost_keys)))})


async def test_an_encrypted_socket_serves_admitted_clients_only(tmp_path: Path) -> None:
    async with service(settings(tmp_path, use_curve=True)) as (_, _, data):
        meta = await data.put(TRAIN, ["a.0"], {"tokens": tokens(7)})
        fetched = await data.get(meta, ["tokens"])
        assert torch.equal(fetched["tokens"].values, tokens(7)[0])
        (shard,) = data.shards
        assert shard.public_key
        context = zmq.Context()
        stranger = ShardConnection.over_network(context, shard, zmq.curve_keypair())
        with pytest.raises(UnavailableError):
            await stranger.request(codec.Abort("put_x"), timeout_s=30)
        assert not stranger.is_open
        stranger.close()
        context.destroy(linger=0)


def test_a_plain_socket_is_refused_outside_loopback() -> None:
    with pytest.raises(ValueError, match="use_curve"):
        TransferQueueSettings(data_bind="0.0.0.0:7100")


async def test_a_run_is_restored_from_its_snapshot(tmp_path: Path) -> None:
    prompt = torch.tensor([1, 2, 3], dtype=torch.int32)
    async with service(settings(tmp_path)) as (_, metadata, data):
        keys = ["g0.0", "g0.1", "g1.0", "g1.1"]
        meta = await data.put(
            TRAIN,
            keys,
            {"tokens": tokens(0, 1, 2, 3)},
            tags={"v_min": [1, 1, 2, 2]},
            shared={"prompt_ids": prompt},
        )
        await data.add_fields(meta.select(keys[:2]), {"extra": torch.tensor([0.5, 1.5])})
        request = AcquireRequest(
            partition_id=TRAIN, consumer="train", fields=("tokens",), num_keys=1
        )
        first = await metadata.acquire(request)
        await metadata.ack(first)
        await metadata.acquire(request)
        await metadata.release(TRAIN, ["g1.1"])
        assert await metadata.save_snapshot("run_1", "step_5") == 3
        with pytest.raises(AlreadyExistsError):
            await metadata.restore_snapshot("run_1", "step_5")
    async with service(settings(tmp_path)) as (_, metadata, data):
        assert await metadata.restore_snapshot("run_1", "step_5") == 3
        meta = await metadata.get_batch(TRAIN, keys[:3])
        assert meta.tag("v_min") == (1, 1, 2)
        fetched = await data.get(meta, ["tokens", "prompt_ids"])
        assert all(map(torch.equal, fetched["tokens"].unbind(), tokens(0, 1, 2)))
        assert all(torch.equal(row, prompt) for row in fetched["prompt_ids"].unbind())
        extra = await data.get(meta.select(keys[:2]), ["extra"])
        assert extra["extra"].values.tolist() == [0.5, 1.5]
        again = await metadata.acquire(
            AcquireRequest(partition_id=TRAIN, consumer="train", fields=("tokens",), num_keys=2)
        )
        assert again.keys == ("g0.1", "g1.0")


async def test_a_snapshot_has_blobs_of_several_frames(tmp_path: Path) -> None:
    row = torch.randint(0, 100, (5 * codec.FRAME_BYTES // 8,), dtype=torch.int32)
    async with service(settings(tmp_path)) as (_, metadata, data):
        await data.put(TRAIN, ["a.0"], {"tokens": [row]})
        assert await metadata.save_snapshot("run_1", "s") == 1
        await metadata.drop_partition(TRAIN)
        assert await metadata.restore_snapshot("run_1", "s") == 1
        fetched = await data.get(await metadata.get_batch(TRAIN, ["a.0"]), ["tokens"])
        assert torch.equal(fetched["tokens"].values, row)


async def test_a_damaged_snapshot_is_refused(tmp_path: Path) -> None:
    async with service(settings(tmp_path)) as (_, metadata, data):
        await data.put(TRAIN, ["a.0"], {"tokens": tokens(1)})
        await metadata.save_snapshot("run_1", "s")
        path = tmp_path / "run_1" / "s.tq"
        path.write_bytes(path.read_bytes()[:-30])
        await metadata.drop_partition(TRAIN)
        with pytest.raises(DataLossError, match="corrupted"):
            await metadata.restore_snapshot("run_1", "s")
        with pytest.raises(NotFoundError):
            await metadata.restore_snapshot("run_1", "t")


@pytest.mark.parametrize("use_shared_memory", [True, False])
async def test_old_samples_are_spilled_to_disk_and_readable(
    tmp_path: Path, use_shared_memory: bool
) -> None:
    config = settings(tmp_path, spill_bytes=16 * MIB)
    async with service(config, use_shared_memory=use_shared_memory) as (_, metadata, data):
        metas = []
        for n in range(4):
            values = [torch.full((2 * MIB,), n, dtype=torch.uint8)]
            metas.append(await data.put(TRAIN, [f"g{n}.0"], {"tokens": values}))
        assert (await metadata.stats()).shards[0].stored_bytes == 8 * MIB
        for n, meta in enumerate(metas):
            fetched = await data.get(meta, ["tokens"])
            assert fetched["tokens"].values.unique().tolist() == [n]
        await metadata.release(TRAIN, [f"g{n}.0" for n in range(4)])
        assert (await metadata.stats()).shards[0].stored_bytes == 0


async def test_links_know_no_shard_before_they_are_opened() -> None:
    links = Links("127.0.0.1:1", use_shared_memory=False)
    with pytest.raises(NotFoundError, match="shard-0"):
        await links.to("shard-0")


def one_blob() -> KVBatchMeta:
    return KVBatchMeta(
        partition_id=TRAIN,
        keys=("g0.0",),
        fields=(pack("tokens", tokens(0)).to_field(0),),
        blobs=(BlobRef(shard_id="shard-1", blob_id=1, size_bytes=32, checksum=0),),
    )


async def test_repeated_requests_of_a_shard_charge_a_put_once(tmp_path: Path) -> None:
    async with (
        service(settings(tmp_path)) as (address, metadata, _),
        open_channel(address, "transferqueue") as channel,
    ):
        await metadata.create_partition(TRAIN, required_fields=["tokens"], quota_bytes=64)
        client = ShardRegistryClient(channel, "shard-1", "life")
        shard = Shard(shard_id="shard-1", endpoint="tcp://127.0.0.1:1", instance_id="life")

        async def fill(*put_ids: str) -> None:
            for put_id in put_ids:
                await client.reserve(put_id, TRAIN, size_bytes=32, wait_s=0.0)
            with pytest.raises(ResourceExhaustedError):
                await client.reserve("more", TRAIN, size_bytes=1, wait_s=0.0)

        await client.register(shard, capacity_bytes=MIB)
        await fill("put-1", "put-2")
        for _ in range(2):
            await client.cancel("put-1")
            await client.cancel("unknown")
        await fill("put-3")
        for _ in range(2):
            await client.commit(one_blob(), put_id="put-2")
        await client.cancel("put-2")
        with pytest.raises(ResourceExhaustedError):
            await client.reserve("more", TRAIN, size_bytes=1, wait_s=0.0)
        await client.register(shard, capacity_bytes=MIB)  # a new lifetime ends pending puts
        await fill("put-4", "put-5")


async def test_the_index_takes_nothing_from_a_shard_that_it_gave_up(tmp_path: Path) -> None:
    async with (
        service(settings(tmp_path)) as (address, metadata, _),
        open_channel(address, "transferqueue") as channel,
    ):
        old, new = (ShardRegistryClient(channel, "shard-1", life) for life in ("old", "new"))
        for life, client in (("old", old), ("new", new)):
            shard = Shard(shard_id="shard-1", endpoint="tcp://127.0.0.1:1", instance_id=life)
            await client.register(shard, capacity_bytes=MIB)
        meta = one_blob()
        for request in (
            old.reserve("put-1", TRAIN, size_bytes=32, wait_s=0.0),
            old.commit(meta, put_id="put-1"),
            old.cancel("put-1"),
        ):
            with pytest.raises(NotFoundError, match="shard-1"):
                await request
        assert (await metadata.get_batch(TRAIN)).num_keys == 0
        await new.reserve("put-1", TRAIN, size_bytes=32, wait_s=0.0)
        await new.commit(meta, put_id="put-1")
        assert (await metadata.get_batch(TRAIN)).keys == ("g0.0",)
