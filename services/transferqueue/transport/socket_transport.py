"""How the bytes of puts and gets move: the interface, and its form over the data socket."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from services.common.errors import DataLossError
from services.transferqueue.concurrency import run_all
from services.transferqueue.tensors.buffers import BufferPool
from services.transferqueue.tensors.packing import PackedColumn
from services.transferqueue.tensors.readplan import Extent
from services.transferqueue.transport import codec
from services.transferqueue.transport.connection import ShardConnection

TIMEOUT_S = 60.0
"""Deadline of one request that does not wait for room."""
_LARGE_PIECE_BYTES = 64 << 10
_READ_BYTES = 4 << 20
_READS_UNDER_WAY = 4


class Transport(Protocol):
    """Moves bytes between tensors and the blobs of one shard."""

    takes_small_puts: bool
    """Whether a small put may go to the shard in one message."""

    async def write(self, grant: codec.Granted, columns: Sequence[PackedColumn]) -> list[int]:
        """Fill granted blobs; returns the checksum of each.

        The tensors must not change before the put is committed.
        """

    async def read(self, extents: Sequence[Extent], target: Tensor) -> None:
        """Fetch bytes of blobs into ``target``, a uint8 tensor.

        Raises:
            DataLossError: If bytes are damaged.
        """

    def close(self) -> None:
        """Let go of what the transport holds besides the connection."""


class SocketTransport:
    """Frames of about 1 MiB over ZeroMQ.

    Args:
        connection: The shard.
        pool: Memory in which small samples are packed.
    """

    takes_small_puts = True

    def __init__(self, connection: ShardConnection, pool: BufferPool) -> None:
        self._connection = connection
        self._pool = pool

    async def write(self, grant: codec.Granted, columns: Sequence[PackedColumn]) -> list[int]:
        """Fill granted blobs; returns the checksum of each."""
        return [
            codec.checksum_of(self._sent(blob_id, column))
            for blob_id, column in zip(grant.blob_ids, columns, strict=True)
        ]

    async def read(self, extents: Sequence[Extent], target: Tensor) -> None:
        """Fetch bytes of blobs into ``target``, a uint8 tensor."""
        view = target.numpy().data
        with_checksum = not all(extent.is_whole for extent in extents)
        window = asyncio.Semaphore(_READS_UNDER_WAY)

        async def fetch(batch: Sequence[Extent]) -> None:
            numbers = tuple([n for e in batch for n in (e.blob.blob_id, e.offset, e.size)])
            async with window:
                request = codec.Read(numbers, in_arena=False, with_checksum=with_checksum)
                answer, buffers = await self._connection.ask(request, timeout_s=TIMEOUT_S)
                self._connection.let_go(answer)
                _check(batch, answer, buffers, with_checksum=with_checksum)
                _scatter(batch, buffers, view)

        await run_all([fetch(batch) for batch in _batches(extents)])
        for extent in extents:
            if extent.is_whole:
                part = view[extent.position : extent.position + extent.size]
                extent.check(codec.checksum(part))

    def close(self) -> None:
        """Nothing is held."""

    def _sent(self, blob_id: int, column: PackedColumn) -> Iterator[memoryview]:
        """Send a column; yields its frames once they are on their way."""
        offset = 0
        for frame in self._frames(column):
            self._connection.tell(codec.Write(blob_id, offset), [frame])
            yield frame
            offset += len(frame)

    def _frames(self, column: PackedColumn) -> Iterator[memoryview]:
        if column.size_bytes < _LARGE_PIECE_BYTES * len(column.pieces):
            yield from column.packed(self._pool.take(column.size_bytes), codec.FRAME_BYTES)
            return
        for piece in column.pieces:
            view = piece.detach().contiguous().view(torch.uint8).numpy().data
            for begin in range(0, len(view), codec.FRAME_BYTES):
                yield view[begin : begin + codec.FRAME_BYTES]


def _batches(extents: Sequence[Extent]) -> Iterator[list[Extent]]:
    batch: list[Extent] = []
    size = 0
    for extent in extents:
        done = 0
        while done < extent.size:
            step = min(extent.size - done, _READ_BYTES - size)
            batch.append(Extent(extent.blob, extent.offset + done, step, extent.position + done))
            done += step
            size += step
            if size == _READ_BYTES or len(batch) == codec.MAX_RANGES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _check(
    batch: Sequence[Extent],
    answer: codec.Response,
    buffers: Sequence[memoryview],
    *,
    with_checksum: bool,
) -> None:
    expected = sum(extent.size for extent in batch)
    is_right = isinstance(answer, codec.Data) and sum(map(len, buffers)) == expected
    if is_right and with_checksum and isinstance(answer, codec.Data):
        is_right = codec.checksum_of(buffers) == answer.checksum
    if not is_right:
        raise DataLossError(
            f"a read of {expected} bytes from {batch[0].blob.shard_id} arrived damaged; read again",
            shard_id=batch[0].blob.shard_id,
        )


def _scatter(batch: Sequence[Extent], buffers: Sequence[memoryview], view: memoryview) -> None:
    number, used = 0, 0
    for extent in batch:
        done = 0
        while done < extent.size:
            step = min(extent.size - done, len(buffers[number]) - used)
            begin = extent.position + done
            view[begin : begin + step] = buffers[number][used : used + step]
            done += step
            used += step
            if used == len(buffers[number]):
                number, used = number + 1, 0
