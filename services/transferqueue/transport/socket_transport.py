"""How the bytes of puts and gets move: the interface, and its form over the data socket."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Protocol

from torch import Tensor

from services.common.errors import DataLossError
from services.transferqueue.concurrency import run_all
from services.transferqueue.tensors.buffers import BufferPool
from services.transferqueue.tensors.packing import PackedColumn, Part
from services.transferqueue.tensors.readplan import Extent, check_whole
from services.transferqueue.transport import codec
from services.transferqueue.transport.checksums import combine
from services.transferqueue.transport.connection import ShardConnection

TIMEOUT_S = 60.0
"""Deadline of one request that does not wait for room."""
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
            combine([self._send(blob_id, part) for part in column.parts()])
            for blob_id, column in zip(grant.blob_ids, columns, strict=True)
        ]

    async def read(self, extents: Sequence[Extent], target: Tensor) -> None:
        """Fetch bytes of blobs into ``target``, a uint8 tensor."""
        view = target.numpy().data
        with_checksum = not all(extent.is_whole for extent in extents)
        window = asyncio.Semaphore(_READS_UNDER_WAY)

        async def fetch(batch: Sequence[Extent]) -> list[int]:
            numbers = tuple([n for e in batch for n in (e.blob.blob_id, e.offset, e.size)])
            async with window:
                request = codec.Read(numbers, in_arena=False, with_checksum=with_checksum)
                answer, buffers = await self._connection.ask(request, timeout_s=TIMEOUT_S)
                self._connection.let_go(answer)
                _check(batch, answer, buffers, with_checksum=with_checksum)
                _scatter(batch, buffers, view)
                return [codec.checksum(view[e.position : e.position + e.size]) for e in batch]

        digests = await run_all([fetch(batch) for batch in _batches(extents)])
        check_whole(extents, list(chain.from_iterable(digests)))

    def close(self) -> None:
        """Nothing is held."""

    def _send(self, blob_id: int, part: Part) -> int:
        """Send a part; returns its checksum, computed while the part is on its way."""
        frame = part.in_place()
        if frame is None:
            frame = part.lay_into(self._pool.take(part.size))
        self._connection.tell(codec.Write(blob_id, part.begin), [frame])
        return codec.checksum(frame)


def _batches(extents: Sequence[Extent]) -> Iterator[list[Extent]]:
    """The parts of extents, in batches for one read each."""
    batch: list[Extent] = []
    size = 0
    for part in chain.from_iterable(extent.parts() for extent in extents):
        if size + part.size > _READ_BYTES or len(batch) == codec.MAX_RANGES:
            yield batch
            batch, size = [], 0
        batch.append(part)
        size += part.size
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
