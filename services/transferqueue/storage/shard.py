"""Assembles a storage shard: its blobs, its data socket, and its shared memory."""

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import zmq

from services.transferqueue.settings import TransferQueueSettings
from services.transferqueue.storage.arena import Arena
from services.transferqueue.storage.blobs import BlobStore, Storage
from services.transferqueue.storage.dataplane import Admission, DataPlane, Metadata, Writer
from services.wire.transferqueue.types import ObjectStoreAddress, Shard


@asynccontextmanager
async def storage_shard(
    settings: TransferQueueSettings, index: Metadata, clients: Admission, *, instance_id: str
) -> AsyncIterator[tuple[Shard, BlobStore, Writer]]:
    """Serves the bytes of one shard until the block ends.

    Args:
        settings: Addresses and capacities.
        index: Makes puts visible.
        clients: Decides who may connect.
        instance_id: Identifies this lifetime of the process.

    Yields:
        The shard's address, its blobs, and the writer of its puts.
    """
    public_key, secret_key = zmq.curve_keypair() if settings.use_curve else (b"", None)
    shard = Shard(
        shard_id=settings.shard_id,
        endpoint="",
        public_key=public_key.decode(),
        instance_id=instance_id,
    )
    arena = None
    async with AsyncExitStack() as stack:
        if settings.backend == "mooncake":
            shard, storage = _mooncake(settings, shard, stack)
        else:
            arena = Arena(settings.capacity_bytes)
            storage = _memory(settings, shard, arena)
        puts = Writer(settings.shard_id, storage, index)
        plane = DataPlane(storage, puts, clients)
        port = await stack.enter_async_context(
            plane.serve(settings.data_bind, secret_key=secret_key)
        )
        shard = replace(shard, endpoint=f"tcp://{settings.advertise_host}:{port}")
        if arena is not None and settings.arena_folder is not None:
            path = settings.arena_folder / f"slipstream-{shard.instance_id}.sock"
            stack.enter_context(plane.serve_local(path, instance_id=shard.instance_id, fd=arena.fd))
            shard = replace(shard, arena_socket=str(path))
        yield shard, storage, puts


def _memory(settings: TransferQueueSettings, shard: Shard, arena: Arena) -> BlobStore:
    spill = None
    if settings.spill_bytes:
        spill = Arena(settings.spill_bytes, settings.spill_folder / f"{shard.instance_id}.spill")
    # Greater than any id of a former lifetime of this shard, if that put fewer than 16 M blobs/s.
    first_blob_id = int(time.time()) << 24
    return Storage(arena, first_blob_id=first_blob_id, spill=spill)


def _mooncake(
    settings: TransferQueueSettings, shard: Shard, stack: AsyncExitStack
) -> tuple[Shard, BlobStore]:
    # Imported only if used: the package is an optional extra.
    from services.transferqueue.storage.object_blobs import ObjectStorage
    from services.wire.data.channels.object_store import ObjectStore

    address = ObjectStoreAddress(
        master=settings.mooncake_master,
        protocol=settings.mooncake_protocol,
        num_replicas=settings.mooncake_replicas,
    )
    capacity = settings.capacity_bytes
    store = ObjectStore(address, host=settings.advertise_host, segment_bytes=capacity)
    storage = ObjectStorage(store, instance_id=shard.instance_id, capacity_bytes=capacity)
    stack.callback(storage.close)
    return replace(shard, object_store=address), storage
