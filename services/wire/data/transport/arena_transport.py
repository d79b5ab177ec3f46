"""Transport through the shared memory of a shard on the same host."""

import asyncio
import mmap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from services.common.errors import DeadlineExceededError, InternalError
from services.common.host import usable_processors
from services.wire.data.encoding import codec
from services.wire.data.encoding.codec import combine
from services.wire.data.encoding.packing import ColumnPart, PackedColumn
from services.wire.data.encoding.readplan import Extent, check_whole
from services.wire.data.transport.connection import ShardConnection
from services.wire.data.transport.socket_transport import TIMEOUT_S, Transport, Writing

_SMALL_BYTES = 64 << 10
_ALONE_BYTES = 2 << 20
"""Size from which threads share a copy; smaller copies finish before a helper thread would be awake."""
NUM_THREADS = min(4, usable_processors())
"""Threads that share a copy; a few saturate the memory bandwidth."""
_HELPERS = ThreadPoolExecutor(max(NUM_THREADS - 1, 1), "helper")
_TURN_ITEMS = 64
"""Items between two turns of the event loop; copying so many items of 1 MiB takes a few milliseconds."""
T = TypeVar("T")
R = TypeVar("R")


class ArenaTransport:
    """Transport with one memory copy per put and one per get.

    Args:
        arena: The shard's shared memory.
        fallback: Reads small ranges and those that the shard has moved to disk.
    """

    def __init__(self, connection: ShardConnection, arena: mmap.mmap, fallback: Transport) -> None:
        self._connection = connection
        self._fallback = fallback
        self._arena = torch.frombuffer(arena, dtype=torch.uint8)

    def prepare(self, columns: Sequence[PackedColumn]) -> Writing:
        """Splits the columns into parts; the returned function copies them into the arena."""
        parts_of_columns = [column.parts() for column in columns]
        size = sum(column.size_bytes for column in columns)

        async def write(grant: codec.Granted) -> list[int]:
            deadline = time.monotonic() + codec.GRANT_S / 2

            def fill(placed: tuple[int, ColumnPart]) -> int:
                position, part = placed
                _check_time(deadline)
                return codec.checksum(part.copy_into(self._arena[position : position + part.size]))

            targets = [
                (position + part.begin, part)
                for position, parts in zip(grant.positions, parts_of_columns, strict=True)
                for part in parts
            ]
            digests = iter(await _for_all(fill, targets, size))
            return [combine(tuple(islice(digests, len(parts)))) for parts in parts_of_columns]

        return write

    async def read(self, extents: Sequence[Extent], target: Tensor) -> None:
        """Fetches bytes of blobs into ``target``, a uint8 tensor."""
        if len(target) < _SMALL_BYTES:
            # One answer with the bytes is faster than one with their positions and an Unpin.
            await self._fallback.read(extents, target)
            return
        for begin in range(0, len(extents), codec.MAX_RANGES):
            await self._read(extents[begin : begin + codec.MAX_RANGES], target)

    async def _read(self, extents: Sequence[Extent], target: Tensor) -> None:
        deadline = time.monotonic() + codec.PIN_S / 2
        numbers = tuple([n for e in extents for n in (e.blob.blob_id, e.offset, e.size)])
        request = codec.Read(numbers, in_arena=True)
        answer, _ = await self._connection.request(request, timeout_s=TIMEOUT_S)
        if not isinstance(answer, codec.Located):
            raise InternalError(f"expected Located, the shard sent {type(answer).__name__}")
        if not answer.positions:
            await self._fallback.read(extents, target)
            return
        source, view = self._arena.numpy(), target.numpy()
        parts = [
            (start + part.position - extent.position, part)
            for extent, start in zip(extents, answer.positions, strict=True)
            for part in extent.parts()
        ]

        def copy(located: tuple[int, Extent]) -> int:
            start, part = located
            _check_time(deadline)
            copied = view[part.position : part.position + part.size]
            copied[:] = source[start : start + part.size]
            return codec.checksum(copied.data)

        try:
            digests = await _for_all(copy, parts, sum(extent.size for extent in extents))
        finally:
            self._connection.release_pin(answer)
        check_whole(extents, digests)


async def _for_all(function: Callable[[T], R], items: Sequence[T], size_bytes: int) -> list[R]:
    if size_bytes < _ALONE_BYTES:
        return list(map(function, items))
    return await map_in_threads(function, items)


def _check_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise DeadlineExceededError(
            "copying took so long that the shard may have reused the memory; "
            "retry with fewer samples"
        )


async def map_in_threads(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Applies ``function`` to each item in the calling thread and a few helpers; the first error ends it.

    The calling thread is that of the event loop. It takes part, because small work is done before the loop
    could be woken for its results. Other tasks run between batches of items.

    Returns:
        The results, in the order of ``items``.
    """
    results: list[R] = []
    for begin in range(0, len(items), _TURN_ITEMS):
        results += _map(function, items[begin : begin + _TURN_ITEMS])
        await asyncio.sleep(0)
    return results


def _map(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    items_left = iter(list(enumerate(items)))
    results: dict[int, R] = {}

    def work() -> None:
        try:
            for number, item in items_left:
                results[number] = function(item)
        finally:
            for _ in items_left:  # after an error the other threads find nothing to do
                pass

    helping = [_HELPERS.submit(work) for _ in range(NUM_THREADS - 1)]
    try:
        work()
    finally:
        # Do not wait for helpers that have not started because other work has the processors.
        helping = [helper for helper in helping if not helper.cancel()]
        wait(helping)
    for helper in helping:
        helper.result()
    return [results[number] for number in range(len(items))]
