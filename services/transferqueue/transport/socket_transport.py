"""How the bytes of puts and gets move: the interface, and its form over the data socket."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Protocol

import torch
import zmq
from torch import Tensor

from services.common.task_group import together
from services.transferqueue.encoding import codec
from services.transferqueue.encoding.codec import combine
from services.transferqueue.encoding.packing import ColumnPart, PackedColumn
from services.transferqueue.encoding.readplan import Extent, check_whole
from services.transferqueue.transport.arrival import Arrival
from services.transferqueue.transport.connection import ShardConnection

TIMEOUT_S = 60.0
"""Deadline of one request that does not wait for room."""
_READS_UNDER_WAY = 2
_AHEAD_PARTS = 3
"""Parts that are packed in the time that a shard takes to find room."""

Writing = Callable[[codec.Granted], Coroutine[Any, Any, list[int]]]
"""Fills granted blobs; returns the checksum of each."""


class Transport(Protocol):
    """Moves bytes between tensors and the blobs of one shard."""

    takes_small_puts: bool
    """Whether a small put may go to the shard in one message."""

    def prepare(self, columns: Sequence[PackedColumn]) -> Writing:
        """Do what needs no room yet; what is returned fills the blobs once they are granted.

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
    """

    takes_small_puts = True

    def __init__(self, connection: ShardConnection) -> None:
        self._connection = connection
        self._scratch = torch.empty(codec.FRAME_BYTES, dtype=torch.uint8)

    def prepare(self, columns: Sequence[PackedColumn]) -> Writing:
        """Pack the first parts."""
        parts = [(n, part) for n, column in enumerate(columns) for part in column.parts()]
        frames = ((n, part.begin, *self._frame(part)) for n, part in parts)
        ready = list(islice(frames, _AHEAD_PARTS))

        async def write(grant: codec.Granted) -> list[int]:
            digests: list[list[int]] = [[] for _ in columns]
            for number, begin, frame, digest in chain(ready, frames):
                self._connection.tell(codec.Write(grant.blob_ids[number], begin), [frame])
                digests[number].append(digest)
            return [combine(of_blob) for of_blob in digests]

        return write

    async def read(self, extents: Sequence[Extent], target: Tensor) -> None:
        """Fetch bytes of blobs into ``target``, a uint8 tensor."""
        view = target.numpy().data
        with_checksum = not all(extent.is_whole for extent in extents)
        window = asyncio.Semaphore(_READS_UNDER_WAY)

        async def fetch(batch: Sequence[Extent]) -> list[int]:
            numbers = tuple([n for e in batch for n in (e.blob.blob_id, e.offset, e.size)])
            request = codec.Read(numbers, in_arena=False, with_checksum=with_checksum)
            arrival = Arrival(batch, view, with_checksum=with_checksum)
            async with window:
                answer, last = await self._connection.ask(
                    request, timeout_s=TIMEOUT_S, take=arrival.take
                )
                self._connection.let_go(answer)
                arrival.take(last)
            return arrival.digests(answer)

        digests = await together([fetch(batch) for batch in _batches(extents)])
        check_whole(extents, list(chain.from_iterable(digests)))

    def close(self) -> None:
        """Nothing is held."""

    def _frame(self, part: ColumnPart) -> tuple[zmq.Frame, int]:
        """The frame of a part, and its checksum."""
        in_place = part.in_place()
        if in_place is not None:
            return zmq.Frame(in_place, copy=False), codec.checksum(in_place)
        # ZeroMQ sends its own memory at once, but tells about that of others in a thread of its own.
        packed = part.lay_into(self._scratch[: part.size])
        return zmq.Frame(packed, copy=True), codec.checksum(packed)


def _batches(extents: Sequence[Extent]) -> Iterator[list[Extent]]:
    """The parts of extents, in batches for one read each."""
    batch: list[Extent] = []
    size = 0
    for part in chain.from_iterable(extent.parts() for extent in extents):
        if size + part.size > codec.MAX_READ_BYTES or len(batch) == codec.MAX_RANGES:
            yield batch
            batch, size = [], 0
        batch.append(part)
        size += part.size
    if batch:
        yield batch
