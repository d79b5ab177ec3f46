"""Runs a transferqueue process: ``python -m services.transferqueue``."""

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from services.common.fields import new_id
from services.common.lifetime import report_ready, wait_for_shutdown
from services.common.rpc.client import open_channel
from services.common.rpc.server import serve
from services.common.security.credentials import acting_as
from services.common.telemetry.logging import configure
from services.transferqueue import metrics
from services.transferqueue.index.index import Index
from services.transferqueue.records.keeper import SampleRecordKeeper
from services.transferqueue.server import SampleRecordServicer, TransferQueueServicer
from services.transferqueue.settings import TransferQueueSettings
from services.transferqueue.shards import RemoteIndex, ShardRegistryServicer, Shards
from services.transferqueue.snapshots.snapshots import Snapshots
from services.transferqueue.storage.dataplane import storage_shard
from services.wire.data.channels.sockets import keep_freed_memory
from services.wire.transferqueue.client import ShardRegistryClient
from services.wire.transferqueue.types import Shard
from slipstream.transferqueue.v1 import transferqueue_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)


@asynccontextmanager
async def transferqueue(settings: TransferQueueSettings) -> AsyncIterator[str]:
    """Serves the index with a local shard, or a shard of another process's index.

    Yields:
        ``host:port`` of the metadata service.
    """
    if settings.index_address:
        async with _shard_of(settings):
            yield settings.index_address
        return
    index = Index(lambda blobs: shards.free(blobs), time)
    metrics.SAMPLES.set_function(index.num_samples)
    shards = Shards(index)
    snapshots = Snapshots(settings.snapshot_folder, index, shards)
    keeper = SampleRecordKeeper(
        settings.sample_folder, settings.sample_bytes, index=index, shards=shards
    )
    async with (
        storage_shard(settings, index, shards, instance_id=new_id("shard")) as (
            shard,
            storage,
            puts,
        ),
        keeper,
    ):
        shards.add_local(
            shard,
            capacity_bytes=storage.capacity_bytes,
            stored_bytes=lambda: storage.used_bytes,
            free=puts.free,
        )

        def register(server: grpc.aio.Server) -> None:
            pb_grpc.add_TransferQueueServiceServicer_to_server(
                TransferQueueServicer(index, shards, snapshots, keeper), server
            )
            pb_grpc.add_SampleRecordServiceServicer_to_server(SampleRecordServicer(keeper), server)
            pb_grpc.add_ShardRegistryServiceServicer_to_server(
                ShardRegistryServicer(index, shards), server
            )

        async with serve(settings.bind, register) as port:
            address = f"{settings.advertise_host}:{port}"
            _report_ready(settings, address, shard)
            yield address


@asynccontextmanager
async def _shard_of(settings: TransferQueueSettings) -> AsyncIterator[None]:
    async with open_channel(settings.index_address, "transferqueue") as channel:
        instance_id = new_id("shard")
        index = RemoteIndex(ShardRegistryClient(channel, settings.shard_id, instance_id))
        async with (
            storage_shard(settings, index, index, instance_id=instance_id) as (
                shard,
                storage,
                puts,
            ),
            index.registered(shard, storage, puts.free),
        ):
            _report_ready(settings, settings.index_address, shard)
            yield


def _report_ready(settings: TransferQueueSettings, address: str, shard: Shard) -> None:
    report_ready(settings.ready_file, {"address": address, "data": shard.endpoint})
    logger.info("transferqueue ready", extra={"address": address, "shard_id": shard.shard_id})


async def _main(settings: TransferQueueSettings) -> None:
    async with settings.serving_metrics(), transferqueue(settings):
        await wait_for_shutdown(stop_on_stdin_eof=settings.stop_on_stdin_eof)


def main() -> None:
    """Runs the process until SIGTERM."""
    keep_freed_memory()
    # Samples consist of many objects without cycles; by default the collector would search for
    # cycles every 700 allocations. Calls leave cycles, megabytes per 10,000 objects.
    gc.set_threshold(10_000, 20, 20)
    settings = TransferQueueSettings()
    configure(level=settings.log_level, log_format=settings.log_format, service="transferqueue")
    with (
        acting_as(settings.identity()),
        settings.tracing("transferqueue"),
    ):
        asyncio.run(_main(settings))


if __name__ == "__main__":
    main()
