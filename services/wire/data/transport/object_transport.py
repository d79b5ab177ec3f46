"""Transport through Mooncake Store."""

import asyncio
import socket
from collections.abc import Sequence

import torch
from torch import Tensor

from services.wire.data.channels.object_store import ObjectStore, object_place, object_range
from services.wire.data.encoding import codec
from services.wire.data.encoding.codec import combine, parts_of
from services.wire.data.encoding.packing import PackedColumn
from services.wire.data.encoding.readplan import Extent
from services.wire.data.transport.socket_transport import Writing
from services.wire.transferqueue.types import Shard


class ObjectTransport:
    """Transport that stores each put as one object.

    Args:
        store: The store.
        instance_id: Lifetime of the shard that issued the blobs' ids.
    """

    takes_small_puts = False

    def __init__(self, store: ObjectStore, instance_id: str) -> None:
        self._store = store
        self._instance_id = instance_id

    def close(self) -> None:
        """Disconnects from the store."""
        self._store.close()

    def prepare(self, columns: Sequence[PackedColumn]) -> Writing:
        """Returns a function that packs the columns directly into the store's buffer."""

        def fill(views: Sequence[memoryview]) -> list[int]:
            return [
                column.copy_into(torch.frombuffer(view, dtype=torch.uint8)) if view else combine(())
                for view, column in zip(views, columns, strict=True)
            ]

        async def write(grant: codec.Granted) -> list[int]:
            key, _ = object_place(self._instance_id, grant.blob_ids[0])
            sizes = [column.size_bytes for column in columns]
            return await asyncio.to_thread(self._store.write, key, sizes, fill)

        return write

    async def read(self, extents: Sequence[Extent], target: Tensor) -> None:
        """Fetches bytes of blobs into ``target``, a uint8 tensor."""
        ranges = [
            object_range(self._instance_id, extent.blob.blob_id, extent.offset, extent.size)
            for extent in extents
        ]
        data = bytearray(sum(extent.size for extent in extents))
        await asyncio.to_thread(self._store.read, ranges, memoryview(data))
        view, done = target.numpy().data, 0
        for extent in extents:
            part = view[extent.position : extent.position + extent.size]
            part[:] = data[done : done + extent.size]
            if extent.is_whole:
                extent.check([codec.checksum(part[p : p + n]) for p, n in parts_of(extent.size)])
            done += extent.size


def open_transport(shard: Shard) -> ObjectTransport:
    """Connects to the store that holds a shard's bytes."""
    assert shard.object_store is not None
    host = socket.gethostbyname(socket.gethostname())
    store = ObjectStore(shard.object_store, host=host, segment_bytes=0)
    return ObjectTransport(store, shard.instance_id)
