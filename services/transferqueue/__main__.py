"""Run a transferqueue: ``python -m services.transferqueue``."""

import asyncio
import json
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import grpc

from services.common.clock import SystemClock
from services.common.grpc_server import serve
from services.common.ids import new_id
from services.common.logging import configure
from services.common.metrics import serve_metrics
from services.transferqueue.arena import Arena
from services.transferqueue.arena_socket import serve_arena
from services.transferqueue.dataplane import DataPlane
from services.transferqueue.facts import Shard, ShardStats
from services.transferqueue.index import Index
from services.transferqueue.puts import Puts
from services.transferqueue.server import TransferQueueServicer
from services.transferqueue.settings import TransferQueueSettings
from services.transferqueue.shards import Shards
from services.transferqueue.storage import Storage
from slipstream.transferqueue.v1 import transferqueue_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)


@asynccontextmanager
async def transferqueue(settings: TransferQueueSettings) -> AsyncIterator[str]:
    """Serve a transferqueue until the block ends.

    Yields:
        ``host:port`` of its metadata service.
    """
    clock = SystemClock()
    shards = Shards()
    index = Index(shards.free, clock)
    arena = Arena(settings.capacity_bytes)
    # Later than any id of a former life of this shard, as long as it put less than 16 M blobs/s.
    storage = Storage(arena, first_blob_id=int(clock.time()) << 24)
    puts = Puts(settings.shard_id, storage, index)
    instance_id = new_id("shard")
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(DataPlane(storage, puts).serve(settings.data_bind))
        arena_socket = ""
        if settings.arena_folder is not None:
            path = settings.arena_folder / f"slipstream-{instance_id}.sock"
            stack.enter_context(serve_arena(path, instance_id=instance_id, fd=arena.fd))
            arena_socket = str(path)
        shard = Shard(
            shard_id=settings.shard_id,
            endpoint=f"tcp://{settings.advertise_host}:{port}",
            arena_socket=arena_socket,
            instance_id=instance_id,
        )
        shards.add(shard, stats=partial(_stats, settings.shard_id, storage), free=puts.free)
        servicer = TransferQueueServicer(index, shards)

        def register(server: grpc.aio.Server) -> None:
            pb_grpc.add_TransferQueueServiceServicer_to_server(servicer, server)

        async with serve(settings.bind, register) as grpc_port:
            address = f"{settings.advertise_host}:{grpc_port}"
            if settings.ready_file is not None:
                ready = {"address": address, "data": shard.endpoint}
                settings.ready_file.write_text(json.dumps(ready) + "\n")
            logger.info("transferqueue ready", extra={"address": address})
            yield address


def _stats(shard_id: str, storage: Storage) -> ShardStats:
    return ShardStats(
        shard_id=shard_id,
        stored_bytes=storage.used_bytes,
        capacity_bytes=storage.capacity_bytes,
    )


async def _main(settings: TransferQueueSettings) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with transferqueue(settings):
        await stopped.wait()


def main() -> None:
    """Run until SIGTERM."""
    settings = TransferQueueSettings()
    configure(level=settings.log_level, log_format=settings.log_format, service="transferqueue")
    with serve_metrics(settings.metrics_port):
        asyncio.run(_main(settings))


if __name__ == "__main__":
    main()
