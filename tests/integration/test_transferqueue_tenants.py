"""Workers of two runs share a transferqueue of two shards, and neither reaches the other's data."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from services.common.errors import (
    FailedPreconditionError,
    PermissionDeniedError,
    ServiceError,
    UnauthenticatedError,
)
from services.common.security import access
from services.common.security.credentials import Identity, acting_as, issue_token
from services.common.telemetry.logging import RareLog
from services.transferqueue.__main__ import transferqueue
from services.transferqueue.settings import TransferQueueSettings
from services.wire.batch import KVBatchMeta
from services.wire.data.client import DataClient
from services.wire.data.encoding import codec
from services.wire.transferqueue.client import TransferQueueClient

KEY = b"k" * 32
SERVICE = Identity(key=KEY)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Clients of a worker of one run."""

    metadata: TransferQueueClient
    data: DataClient


def settings(folder: Path, **changes: object) -> TransferQueueSettings:
    return TransferQueueSettings(
        capacity_bytes=4 << 20, snapshot_folder=folder, arena_folder=None, use_curve=True, **changes
    )


@asynccontextmanager
async def two_shards(folder: Path) -> AsyncIterator[str]:
    with acting_as(SERVICE):
        async with (
            transferqueue(settings(folder)) as address,
            transferqueue(settings(folder, index_address=address, shard_id="shard-1")),
        ):
            yield address


@asynccontextmanager
async def tenant(address: str, run_id: str) -> AsyncIterator[Tenant]:
    with acting_as(Identity(run_token=issue_token(KEY, run_id))):
        async with (
            TransferQueueClient.connect(address) as metadata,
            DataClient.connect(address, put_timeout_s=0.5) as data,
        ):
            async with asyncio.timeout(10):
                while len(data.shards) < 2:  # noqa: ASYNC110  another process changes the state
                    await asyncio.sleep(0.01)
            yield Tenant(metadata, data)


@asynccontextmanager
async def two_tenants(folder: Path) -> AsyncIterator[tuple[Tenant, Tenant, KVBatchMeta]]:
    """Yields workers of the runs a and b, and the metadata of run a's samples."""
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(two_shards(folder))
        with acting_as(SERVICE):
            controller = await stack.enter_async_context(TransferQueueClient.connect(address))
        for run_id in ("run_a", "run_b"):
            await controller.create_partition(f"{run_id}/train", required_fields=["tokens"])
        first_tenant = await stack.enter_async_context(tenant(address, "run_a"))
        second_tenant = await stack.enter_async_context(tenant(address, "run_b"))
        keys = [f"g{number}.0" for number in range(8)]
        rows = [torch.full((8,), number + 1, dtype=torch.int32) for number in range(8)]
        meta = await first_tenant.data.put("run_a/train", keys, {"tokens": rows})
        assert {blob.shard_id for blob in meta.blobs} == {"shard-0", "shard-1"}
        yield first_tenant, second_tenant, meta


async def test_a_run_reads_only_its_samples_on_every_shard(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as (owner, _, meta):
        fetched = await owner.data.get(meta, ["tokens"])
        assert fetched["tokens"].values.tolist() == [n + 1 for n in range(8) for _ in range(8)]


async def test_another_run_sees_neither_metadata_nor_bytes(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as (_, intruder, meta):
        for call in (
            intruder.metadata.get_batch("run_a/train"),
            intruder.metadata.drop_partition("run_a/train"),
            intruder.metadata.create_partition("run_a/more", required_fields=[]),
            intruder.metadata.save_snapshot("run_a", "s1"),
            intruder.metadata.stats(),
        ):
            with pytest.raises(PermissionDeniedError):
                await call
        for blob in meta.blobs:
            link = await intruder.data._links.to(blob.shard_id)
            with pytest.raises(PermissionDeniedError):
                await link.connection.request(
                    codec.Read((blob.blob_id, 0, blob.size_bytes), in_arena=False), timeout_s=5
                )


async def test_another_run_cannot_write(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as (owner, intruder, meta):
        with pytest.raises(PermissionDeniedError):
            await intruder.data.put("run_a/train", ["x.0"], {"tokens": [torch.zeros(2)]})
        blob = meta.blobs[0]
        link = await intruder.data._links.to(blob.shard_id)
        link.connection.send_request(codec.Write(blob.blob_id, 0), [b"\0" * blob.size_bytes])
        forged = replace(meta, partition_id="run_b/train")
        with pytest.raises(ServiceError):
            link.connection.send_request(codec.Describe("put_x", forged.to_bytes()))
            await link.connection.request(codec.Commit("put_x", (blob.checksum,)), timeout_s=5)
        fetched = await owner.data.get(meta, ["tokens"])
        assert fetched["tokens"].values[:8].tolist() == [1] * 8


async def test_connections_need_a_token(tmp_path: Path) -> None:
    async with two_shards(tmp_path) as address:
        with acting_as(Identity()):
            async with TransferQueueClient.connect(address) as metadata:
                with pytest.raises(UnauthenticatedError):
                    await metadata.stats()


async def test_a_run_sets_no_quota_and_makes_no_partitions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_refusals", RareLog(access.logger))
    async with two_tenants(tmp_path) as (owner, _, _meta):
        for call in (
            owner.metadata.create_partition(
                "run_a/train", required_fields=["tokens"], quota_bytes=1 << 60
            ),
            owner.metadata.create_partition("run_a/more", required_fields=[]),
            owner.metadata.drop_partition("run_a/train"),
            owner.metadata.save_snapshot("run_a", "s1"),
            owner.metadata.restore_snapshot("run_a", "s1"),
        ):
            with pytest.raises(PermissionDeniedError):
                await call
        assert "rejected a worker's call" in caplog.text
        assert await owner.metadata.get_batch("run_a/train")


async def test_the_token_of_a_run_that_does_not_live_opens_nothing(tmp_path: Path) -> None:
    async with two_shards(tmp_path) as address:
        with acting_as(Identity(run_token=issue_token(KEY, "run_never"))):
            async with TransferQueueClient.connect(address) as metadata:
                with pytest.raises(FailedPreconditionError, match="run_never has no partitions"):
                    await anext(aiter(metadata.connect_client("x" * 40)))


async def test_a_worker_that_is_early_connects_once_its_run_has_started(tmp_path: Path) -> None:
    async with two_shards(tmp_path) as address:
        with acting_as(Identity(run_token=issue_token(KEY, "run_a"))):
            early = asyncio.ensure_future(
                DataClient.connect(address, put_timeout_s=0.5).__aenter__()
            )
            await asyncio.sleep(0)
        with acting_as(SERVICE):
            async with TransferQueueClient.connect(address) as controller:
                await controller.create_partition("run_a/train", required_fields=[])
        data = await early
        assert data.shards


async def test_a_run_cannot_end_the_holds_of_another(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as (owner, intruder, meta):
        blob = meta.blobs[0]
        link = await owner.data._links.to(blob.shard_id)
        answer, _ = await link.connection.request(
            codec.Read((blob.blob_id, 0, blob.size_bytes), in_arena=False), timeout_s=5
        )
        assert isinstance(answer, codec.Data)
        own_link = await intruder.data._links.to(blob.shard_id)
        for pin_id in range(1, 100):
            own_link.connection.send_request(codec.Unpin(pin_id))
        assert (await owner.data.get(meta, ["tokens"]))["tokens"].values[:8].tolist() == [1] * 8
