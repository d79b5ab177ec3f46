"""Reads and writes whole blobs as bytes: the service's connection to the shards, without tensors."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

import zmq

from services.common.errors import DataLossError, InternalError, NotFoundError
from services.common.ids import new_id
from services.transferqueue.shards.shards import Shards
from services.wire.batch import BlobRef, KVBatchMeta
from services.wire.data.encoding import codec
from services.wire.data.transport.connection import ShardConnection

_TIMEOUT_S = 60.0
_READ_BYTES = 4 << 20


class BlobClient:
    """Reads and writes blobs through the data sockets of shards; see ``connect``."""

    def __init__(self, connections: dict[str, ShardConnection]) -> None:
        self._connections = connections

    @classmethod
    @asynccontextmanager
    async def connect(cls, shards: Shards) -> AsyncIterator["BlobClient"]:
        """Connects to the shards that exist now."""
        context = zmq.Context()
        key_pair = zmq.curve_keypair()
        connections: dict[str, ShardConnection] = {}
        try:
            async with aclosing(shards.connect(key_pair[0].decode())) as admitted:
                for shard in await anext(admitted):
                    connections[shard.shard_id] = ShardConnection.over_network(
                        context, shard, key_pair
                    )
                yield cls(connections)
        finally:
            for connection in connections.values():
                connection.close()
            context.destroy(linger=0)

    async def read(self, blob: BlobRef, ranges: Sequence[tuple[int, int]]) -> bytes:
        """Returns the concatenated bytes of ``(offset, size)`` ranges of a blob.

        Raises:
            DataLossError: If they arrive damaged.
        """
        connection = self._connection(blob.shard_id)
        parts: list[bytes] = []
        for offset, size in ranges:
            for begin in range(offset, offset + size, _READ_BYTES):
                step = min(_READ_BYTES, offset + size - begin)
                request = codec.Read((blob.blob_id, begin, step), in_arena=False)
                answer, frames = await connection.ask(request, timeout_s=_TIMEOUT_S)
                data = b"".join(frames)
                connection.release_pin(answer)
                if not isinstance(answer, codec.Data) or codec.checksum(data) != answer.checksum:
                    raise DataLossError(f"blob {blob.blob_id} on {blob.shard_id} is corrupted")
                parts.append(data)
        return b"".join(parts)

    async def put(self, shard_id: str, meta: KVBatchMeta, payload: Sequence[bytes]) -> None:
        """Stores samples; ``payload`` holds the bytes of each blob of ``meta``."""
        connection = self._connection(shard_id)
        put_id = new_id("put")
        sizes = tuple(map(len, payload))
        reserve = codec.Reserve(put_id, meta.partition_id, sizes, 0.0)
        grant, _ = await connection.ask(reserve, timeout_s=_TIMEOUT_S)
        if not isinstance(grant, codec.Granted):
            raise InternalError(f"expected Granted, the shard sent {type(grant).__name__}")
        connection.send_request(codec.Describe(put_id, meta.to_bytes()))
        for blob_id, data in zip(grant.blob_ids, payload, strict=True):
            view = memoryview(data)
            for begin in range(0, len(data), codec.FRAME_BYTES):
                frame = view[begin : begin + codec.FRAME_BYTES]
                connection.send_request(codec.Write(blob_id, begin), [frame])
        commit = codec.Commit(put_id, tuple(blob.checksum for blob in meta.blobs))
        await connection.ask(commit, timeout_s=_TIMEOUT_S)

    def _connection(self, shard_id: str) -> ShardConnection:
        if shard_id not in self._connections:
            raise NotFoundError(f"shard {shard_id} is gone", shard_id=shard_id)
        return self._connections[shard_id]
