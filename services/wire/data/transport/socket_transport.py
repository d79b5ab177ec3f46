"""Interface of a transport, and the transport over the data socket."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Protocol

import torch
import xxhash
import zmq
from torch import Tensor

from services.common.errors import DataLossError
from services.common.task_group import gather_in_group
from services.wire.data.encoding import codec
from services.wire.data.encoding.codec import combine
from services.wire.data.encoding.packing import ColumnPart, PackedColumn
from services.wire.data.encoding.readplan import Extent, check_whole
from services.wire.data.transport.connection import ShardConnection


class Arrival:
    """Assembles the answer to one read.

    Args:
        batch: Parts of extents, which arrive one after the other.
        with_checksum: Also compute the checksum of all frames.
    """

    def __init__(self, batch: Sequence[Extent], view: memoryview, *, with_checksum: bool) -> None:
        self._batch = batch
        self._view = view
        self._hash = xxhash.xxh3_64() if with_checksum else None
        self._digests: list[int] = []
        self._done = 0
        self._num_excess = 0

    def copy_frames(self, frames: Sequence[memoryview]) -> None:
        """Copies frames; computes each complete part's checksum while the part is in the cache."""
        for frame in frames:
            if self._hash is not None:
                self._hash.update(frame)
            num_used = 0
            while num_used < len(frame) and len(self._digests) < len(self._batch):
                num_used += self._copy_part(frame[num_used:])
            self._num_excess += len(frame) - num_used

    def digests(self, answer: codec.Response) -> list[int]:
        """Returns the checksums of the parts; call it after the last frame.

        Raises:
            DataLossError: If the frames differ from those requested and sent.
        """
        is_right = (
            isinstance(answer, codec.Data)
            and len(self._digests) == len(self._batch)
            and self._num_excess == 0
            and (self._hash is None or self._hash.intdigest() == answer.checksum)
        )
        if not is_right:
            shard_id = self._batch[0].blob.shard_id
            raise DataLossError(
                f"a read from shard {shard_id} arrived corrupted; retry", shard_id=shard_id
            )
        return self._digests

    def _copy_part(self, data: memoryview) -> int:
        extent = self._batch[len(self._digests)]
        size = min(extent.size - self._done, len(data))
        begin = extent.position + self._done
        self._view[begin : begin + size] = data[:size]
        self._done += size
        if self._done == extent.size:
            view = self._view[extent.position : extent.position + extent.size]
            self._digests.append(codec.checksum(view))
            self._done = 0
        return size


TIMEOUT_S = 60.0
"""Deadline of a request that does not wait for space."""
_READS_UNDER_WAY = 2
_AHEAD_PARTS = 3
"""Parts that are packed while a shard reserves space."""

Writing = Callable[[codec.Granted], Coroutine[Any, Any, list[int]]]
"""Fills granted blobs; returns the checksum of each."""


class Transport(Protocol):
    """Interface that moves bytes between tensors and the blobs of one shard."""

    def prepare(self, columns: Sequence[PackedColumn]) -> Writing:
        """Does the work that needs no space yet; returns a function that fills the granted blobs.

        The tensors must not change before the put is committed.
        """

    async def read(self, extents: Sequence[Extent], target: Tensor) -> None:
        """Fetches bytes of blobs into ``target``, a uint8 tensor.

        Raises:
            DataLossError: If bytes are damaged.
        """


class SocketTransport:
    """Transport of frames of about 1 MiB over ZeroMQ."""

    def __init__(self, connection: ShardConnection) -> None:
        self._connection = connection
        self._scratch = torch.empty(codec.FRAME_BYTES, dtype=torch.uint8)

    def prepare(self, columns: Sequence[PackedColumn]) -> Writing:
        """Packs the first parts; the returned function sends all of them."""
        column_parts = [(n, part) for n, column in enumerate(columns) for part in column.parts()]
        frames = ((n, part.begin, *self._frame(part)) for n, part in column_parts)
        first_frames = list(islice(frames, _AHEAD_PARTS))

        async def write(grant: codec.Granted) -> list[int]:
            digests: list[list[int]] = [[] for _ in columns]
            for number, begin, frame, digest in chain(first_frames, frames):
                self._connection.send_request(codec.Write(grant.blob_ids[number], begin), [frame])
                digests[number].append(digest)
            return [combine(of_blob) for of_blob in digests]

        return write

    async def read(self, extents: Sequence[Extent], target: Tensor) -> None:
        """Fetches bytes of blobs into ``target``, a uint8 tensor."""
        view = target.numpy().data
        with_checksum = not all(extent.is_whole for extent in extents)
        window = asyncio.Semaphore(_READS_UNDER_WAY)

        async def fetch(batch: Sequence[Extent]) -> list[int]:
            numbers = tuple([n for e in batch for n in (e.blob.blob_id, e.offset, e.size)])
            request = codec.Read(numbers, in_arena=False, with_checksum=with_checksum)
            arrival = Arrival(batch, view, with_checksum=with_checksum)
            async with window:
                answer, last = await self._connection.request(
                    request, timeout_s=TIMEOUT_S, take=arrival.copy_frames
                )
                self._connection.release_pin(answer)
                arrival.copy_frames(last)
            return arrival.digests(answer)

        digests = await gather_in_group([fetch(batch) for batch in _batches(extents)])
        check_whole(extents, list(chain.from_iterable(digests)))

    def _frame(self, part: ColumnPart) -> tuple[zmq.Frame, int]:
        in_place = part.in_place()
        if in_place is not None:
            return zmq.Frame(in_place, copy=False), codec.checksum(in_place)
        # ZeroMQ sends copied memory without delay; for memory that it does not own, it runs a release
        # callback in its own thread.
        packed = part.copy_into(self._scratch[: part.size])
        return zmq.Frame(packed, copy=True), codec.checksum(packed)


def _batches(extents: Sequence[Extent]) -> Iterator[list[Extent]]:
    """Groups the parts of extents into batches, one per read request."""
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
