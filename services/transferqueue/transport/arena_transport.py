"""Bytes of puts and gets through the shared memory of a shard on the same host."""

import mmap
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.common.errors import DeadlineExceededError, InternalError
from services.transferqueue.concurrency import in_thread, run_all
from services.transferqueue.tensors.packing import PackedColumn
from services.transferqueue.tensors.readplan import Extent
from services.transferqueue.transport import codec
from services.transferqueue.transport.connection import ShardConnection
from services.transferqueue.transport.socket_transport import TIMEOUT_S, Transport

_SMALL_BYTES = 64 << 10
_INLINE_BYTES = 4 << 20
_STEP_BYTES = 4 << 20
"""Copies below this take less time than handing them to a thread."""
T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]


class ArenaTransport:
    """One copy per put and one per get.

    Args:
        connection: The shard.
        arena: Its memory.
        fallback: Reads what is small, and what the shard has moved to disk.
    """

    takes_small_puts = True

    def __init__(self, connection: ShardConnection, arena: mmap.mmap, fallback: Transport) -> None:
        self._connection = connection
        self._fallback = fallback
        self._arena = torch.frombuffer(arena, dtype=torch.uint8)

    async def write(self, grant: codec.Granted, columns: Sequence[PackedColumn]) -> list[int]:
        """Fill granted blobs; returns the checksum of each."""
        deadline = time.monotonic() + codec.GRANT_S / 2

        def fill(position: int, column: PackedColumn) -> int:
            target = self._arena[position : position + column.size_bytes]
            return codec.checksum_of(_in_time(column.packed(target, _STEP_BYTES), deadline))

        # Columns are copied by several threads: one alone does not use up the memory's bandwidth.
        return await run_all(
            [
                _run(partial(fill, position, column), column.size_bytes)
                for position, column in zip(grant.positions, columns, strict=True)
            ]
        )

    async def read(self, extents: Sequence[Extent], target: Tensor) -> None:
        """Fetch bytes of blobs into ``target``, a uint8 tensor."""
        if len(target) < _SMALL_BYTES:
            # One answer with the bytes is quicker than one with their place and a message to let go.
            await self._fallback.read(extents, target)
            return
        for begin in range(0, len(extents), codec.MAX_RANGES):
            await self._read(extents[begin : begin + codec.MAX_RANGES], target)

    def close(self) -> None:
        """The mapping goes with the last tensor that views it."""

    async def _read(self, extents: Sequence[Extent], target: Tensor) -> None:
        deadline = time.monotonic() + codec.PIN_S / 2
        numbers = tuple([n for e in extents for n in (e.blob.blob_id, e.offset, e.size)])
        request = codec.Read(numbers, in_arena=True)
        answer, _ = await self._connection.ask(request, timeout_s=TIMEOUT_S)
        if not isinstance(answer, codec.Located):
            raise InternalError(f"expected Located, the shard sent {type(answer).__name__}")
        if not answer.positions:
            await self._fallback.read(extents, target)
            return
        source, view = self._arena.numpy(), target.numpy()

        def copy(located: Sequence[tuple[Extent, int]]) -> None:
            for extent, start in located:
                parts = _copied(source[start : start + extent.size], view[extent.position :])
                parts = _in_time(parts, deadline)
                if extent.is_whole:
                    extent.check(codec.checksum_of(parts))
                else:
                    deque(parts, maxlen=0)

        jobs = _shared_out(list(zip(extents, answer.positions, strict=True)))
        try:
            await run_all([_run(partial(copy, job), sum(e.size for e, _ in job)) for job in jobs])
        finally:
            self._connection.let_go(answer)


def _shared_out(located: list[tuple[Extent, int]]) -> list[list[tuple[Extent, int]]]:
    """Cut into pieces of work for several threads: large extents alone, the small ones together."""
    jobs = [[one] for one in located if one[0].size >= _INLINE_BYTES]
    small = [one for one in located if one[0].size < _INLINE_BYTES]
    return [*jobs, small] if small else jobs


def _copied(source: Bytes, target: Bytes) -> Iterator[memoryview]:
    """Copy part by part; what is done with a part at once finds it in the cache."""
    for begin in range(0, len(source), _STEP_BYTES):
        part = source[begin : begin + _STEP_BYTES]
        copied = target[begin : begin + len(part)]
        copied[:] = part
        yield copied.data


async def _run(work: Callable[[], T], size_bytes: int) -> T:
    if size_bytes < _INLINE_BYTES:
        return work()
    return await in_thread(work)


def _in_time(parts: Iterable[memoryview], deadline: float) -> Iterator[memoryview]:
    for part in parts:
        yield part
        _check_time(deadline)


def _check_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise DeadlineExceededError(
            "copying took so long that the shard may use the memory for other samples; "
            "try again with fewer samples"
        )
