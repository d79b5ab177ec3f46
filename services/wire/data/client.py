"""Client that writes and reads the tensors of samples; used by rollouts and trainer.

- put: reserve space (waits while the queue is full), send the bytes, commit; then it is visible
- get: one read per shard; needs only the ``KVBatchMeta``
"""

import asyncio
import ctypes
import mmap
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from services.common.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)
from services.common.fields import group_of, new_id
from services.common.task_group import TaskGroup, gather_in_group, unwrapped
from services.wire.batch import BlobRef, KVBatchMeta, as_tag
from services.wire.data.encoding import codec
from services.wire.data.encoding.packing import (
    PackedColumn,
    Values,
    pack,
    select_rows,
    share,
    unpack,
)
from services.wire.data.encoding.readplan import Extent, plan_read
from services.wire.data.jagged import Jagged
from services.wire.data.placement import place
from services.wire.data.transport.connection import CONNECT_TIMEOUT_S, ShardConnection
from services.wire.data.transport.links import RETRY_S, Link, Links
from services.wire.data.transport.socket_transport import TIMEOUT_S
from services.wire.transferqueue.client import TransferQueueClient
from services.wire.transferqueue.types import Shard

_MIN_BYTES = 1 << 16
_HUGE_PAGE_BYTES = 2 << 20
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class BufferPool:
    """Allocates buffers for reads and takes them back when their tensors are garbage-collected.

    A page fault costs about four copies of the page, and one batch spans hundreds of pages.

    Args:
        keep_bytes: Max unused memory that the pool keeps.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._idle: list[mmap.mmap] = []
        # Finalizers may run in any thread.
        self._lock = threading.RLock()

    def allocate(self, size_bytes: int) -> Tensor:
        """Returns a uint8 tensor of ``size_bytes``; its memory returns to the pool with its last view."""
        with self._lock:
            block = self._block(size_bytes)
        holder = (ctypes.c_char * max(size_bytes, 1)).from_buffer(block)
        weakref.finalize(holder, self._return_block, block).atexit = False
        return torch.frombuffer(holder, dtype=torch.uint8, count=max(size_bytes, 1))[:size_bytes]

    def _block(self, size_bytes: int) -> mmap.mmap:
        # Prefer the most recently used block: it is still in the cache.
        idle = reversed(self._idle)
        fitting = [b for b in idle if size_bytes <= len(b) <= 2 * size_bytes + _MIN_BYTES]
        if fitting:
            block = min(fitting, key=len)
            self._idle.remove(block)
            return block
        if size_bytes < _HUGE_PAGE_BYTES:
            return mmap.mmap(-1, max(_MIN_BYTES, size_bytes), flags=_FLAGS | mmap.MAP_POPULATE)
        block = mmap.mmap(-1, size_bytes, flags=_FLAGS)
        # Huge pages cause hundreds of times fewer page faults and are copied a quarter faster.
        block.madvise(mmap.MADV_HUGEPAGE)
        return block

    def _return_block(self, block: mmap.mmap) -> None:
        with self._lock:
            self._idle.append(block)
            while self._idle and sum(map(len, self._idle)) > self._keep_bytes:
                self._idle.pop(0)


_KEEP_BYTES = 512 << 20
T = TypeVar("T")
R = TypeVar("R")

Tags = Mapping[str, Sequence[int] | Sequence[float] | Sequence[str]]


class DataClient:
    """Writes tensors to a transferqueue and reads them back; see ``connect``.

    Args:
        put_timeout_s: Max seconds that a put waits for space.
        outage_timeout_s: Max seconds that a transfer waits for a lost connection.
    """

    def __init__(
        self, links: Links, pool: BufferPool, *, put_timeout_s: float, outage_timeout_s: float
    ) -> None:
        self._links = links
        self._pool = pool
        self._put_timeout_s = put_timeout_s
        self._outage_timeout_s = outage_timeout_s

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        address: str,
        *,
        put_timeout_s: float = 300.0,
        outage_timeout_s: float = CONNECT_TIMEOUT_S,
        use_shared_memory: bool = True,
    ) -> AsyncIterator["DataClient"]:
        """Connects to the transferqueue whose metadata service is at ``host:port``.

        Args:
            put_timeout_s: Max seconds that a put waits for space.
            outage_timeout_s: Max seconds that a transfer waits for a lost connection.
            use_shared_memory: Use the memory of shards on this host directly; False forces the
                network path, for measurements.
        """
        links = Links(address, use_shared_memory=use_shared_memory)
        async with TransferQueueClient.connect(address) as metadata, links.opened(metadata):
            yield cls(
                links,
                BufferPool(_KEEP_BYTES),
                put_timeout_s=put_timeout_s,
                outage_timeout_s=outage_timeout_s,
            )

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self._links.shards

    def outage(self) -> str:
        """Returns what has been unreachable for too long, with its address; empty if there is nothing."""
        return self._links.outage() if self._links.outage_s >= CONNECT_TIMEOUT_S else ""

    async def put(
        self,
        partition_id: str,
        keys: Sequence[str],
        fields: Mapping[str, Values],
        *,
        tags: Tags | None = None,
        shared: Mapping[str, Tensor] | None = None,
    ) -> KVBatchMeta:
        """Stores samples; returns when they are visible.

        Args:
            keys: New keys, or existing ones that lack these fields.
            fields: Values of each field, one row per key.
            tags: Small facts, one per key; all new samples of a partition have the same tags.
            shared: Values that all these keys share, such as the prompt of a group: one row of each
                field, stored once.

        Returns:
            Description of the samples.

        Raises:
            ResourceExhaustedError: If there was no space in time; the message names the limit.
            AlreadyExistsError: If a key already has one of the fields, also if the connection broke
                after this call stored it.
            DeadlineExceededError: If the transferqueue was unreachable for too long; names its address.
            InvalidArgumentError: If types or numbers of rows do not match.
        """
        tags = tags or {}
        groups = tags.get("group_id") or [group_of(key) for key in keys]
        homes = {group: place(str(group), self._links.shards) for group in set(groups)}
        if len(set(homes.values())) == 1:
            columns = _pack_all(fields, shared or {}, len(keys))
            return await self._put_on(
                homes[groups[0]], _describe(partition_id, keys, columns, tags), columns
            )
        indexes_by_home: dict[str, list[int]] = {}
        for index, group in enumerate(groups):
            indexes_by_home.setdefault(homes[group], []).append(index)
        puts = []
        for shard_id, indexes in indexes_by_home.items():
            rows = {name: select_rows(values, indexes) for name, values in fields.items()}
            columns = _pack_all(rows, shared or {}, len(indexes))
            row_tags = {name: as_tag([values[i] for i in indexes]) for name, values in tags.items()}
            meta = _describe(partition_id, [keys[i] for i in indexes], columns, row_tags)
            puts.append(self._put_on(shard_id, meta, columns))
        return KVBatchMeta.concat(await gather_in_group(puts)).select(keys)

    async def add_fields(self, meta: KVBatchMeta, fields: Mapping[str, Values]) -> KVBatchMeta:
        """Adds fields to stored samples; returns ``meta`` with them.

        Raises:
            ServiceError: As ``put``.
        """
        new_columns = await self.put(meta.partition_id, meta.keys, fields)
        numbers = {i: i + len(meta.blobs) for i in range(len(new_columns.blobs))}
        return replace(
            meta,
            fields=meta.fields + tuple(column.renumber(numbers) for column in new_columns.fields),
            blobs=meta.blobs + new_columns.blobs,
            revision=new_columns.revision,
        )

    async def get(self, meta: KVBatchMeta, fields: Sequence[str]) -> dict[str, Jagged]:
        """Fetches tensors, in the order of the keys.

        Returns:
            Rows of each field. The caller owns their memory.

        Raises:
            NotFoundError: If a sample was released or lacks a field.
            DeadlineExceededError: As ``put``.
            DataLossError: If bytes are damaged.
            ValueError: If a field does not exist.
        """
        plan = plan_read(meta, fields)
        data = self._pool.allocate(plan.size_bytes)
        by_shard: dict[str, list[Extent]] = {}
        for extent in plan.extents:
            by_shard.setdefault(extent.blob.shard_id, []).append(extent)

        def read_into(extents: list[Extent]) -> Callable[[Link], Awaitable[None]]:
            return lambda link: link.transport.read(extents, data)

        await gather_in_group(
            [self._through_outages(shard, read_into(reads)) for shard, reads in by_shard.items()]
        )
        view = data.numpy().data
        for source, target, size in plan.copies:
            view[target : target + size] = view[source : source + size]
        return {column.name: unpack(column, data[begin:end]) for column, begin, end in plan.columns}

    async def _through_outages(self, shard_id: str, transfer: Callable[[Link], Awaitable[T]]) -> T:
        """Executes a transfer; repeats it if its connection breaks, until the outage takes too long."""
        begin = 0.0
        while True:
            try:
                return await transfer(await self._links.to(shard_id))
            except UnavailableError as error:
                begin = begin or time.monotonic()
                if time.monotonic() - begin >= self._outage_timeout_s:
                    raise DeadlineExceededError(self._links.outage() or str(error)) from error
            await asyncio.sleep(RETRY_S)

    async def _put_on(
        self, shard_id: str, meta: KVBatchMeta, columns: Sequence[PackedColumn]
    ) -> KVBatchMeta:
        return await self._through_outages(
            shard_id, lambda link: self._write(link, shard_id, meta, columns)
        )

    async def _write(
        self, link: Link, shard_id: str, meta: KVBatchMeta, columns: Sequence[PackedColumn]
    ) -> KVBatchMeta:
        put_id = new_id("put")
        sizes = tuple(column.size_bytes for column in columns)
        meta = replace(meta, blobs=_blobs(shard_id, range(len(sizes)), sizes, (0,) * len(sizes)))
        if sum(sizes) <= codec.STORE_BYTES:
            return await self._store(link.connection, put_id, meta, columns)
        reserve = codec.Reserve(put_id, meta.partition_id, sizes, self._put_timeout_s)
        try:
            timeout_s = self._put_timeout_s + TIMEOUT_S
            asking = link.connection.request(reserve, timeout_s=timeout_s)
            answer, (description, write) = await run_while_waiting(
                asking, lambda: (meta.to_bytes(), link.transport.prepare(columns))
            )
            grant = _expect(codec.Granted, answer)
            link.connection.send_request(codec.Describe(put_id, description))
            checksums = await write(grant)
            commit = codec.Commit(put_id, tuple(checksums))
            # Over a slow link, the bytes may take as long as the shard reserves the space for them.
            answer = await link.connection.request(commit, timeout_s=codec.GRANT_S)
        except BaseException:
            link.connection.abort(put_id)
            raise
        blobs = _blobs(shard_id, grant.blob_ids, sizes, checksums)
        return replace(meta, blobs=blobs, revision=_expect(codec.Committed, answer).revision)

    async def _store(
        self,
        connection: ShardConnection,
        put_id: str,
        meta: KVBatchMeta,
        columns: Sequence[PackedColumn],
    ) -> KVBatchMeta:
        sizes = tuple(column.size_bytes for column in columns)
        contents = [column.joined() for column in columns]
        checksums = tuple(map(codec.blob_checksum, contents))
        store = codec.Store(
            put_id, meta.partition_id, sizes, self._put_timeout_s, meta.to_bytes(), checksums
        )
        timeout_s = self._put_timeout_s + TIMEOUT_S
        answer = await connection.request(store, [b"".join(contents)], timeout_s=timeout_s)
        blobs_stored = _expect(codec.Stored, answer)
        blobs = _blobs(connection.shard.shard_id, blobs_stored.blob_ids, sizes, checksums)
        return replace(meta, blobs=blobs, revision=blobs_stored.revision)


def _pack_all(
    fields: Mapping[str, Values], shared: Mapping[str, Tensor], num_keys: int
) -> list[PackedColumn]:
    columns = [pack(name, values) for name, values in fields.items()]
    return columns + [share(name, row, num_keys) for name, row in shared.items()]


def _describe(
    partition_id: str, keys: Sequence[str], columns: Sequence[PackedColumn], tags: Tags
) -> KVBatchMeta:
    for column in columns:
        if len(column.lengths) != len(keys):
            raise InvalidArgumentError(
                f"field {column.name!r} has {len(column.lengths)} rows for {len(keys)} keys",
                field=column.name,
            )
    return KVBatchMeta(
        partition_id=partition_id,
        keys=tuple(keys),
        fields=tuple(column.to_field(number) for number, column in enumerate(columns)),
        tags={name: as_tag(values) for name, values in tags.items()},
    )


def _blobs(
    shard_id: str, blob_ids: Sequence[int], sizes: Sequence[int], checksums: Sequence[int]
) -> tuple[BlobRef, ...]:
    return tuple(
        BlobRef(shard_id=shard_id, blob_id=blob_id, size_bytes=size, checksum=checksum)
        for blob_id, size, checksum in zip(blob_ids, sizes, checksums, strict=True)
    )


def _expect(cls: type[T], answer: tuple[codec.Response, list[memoryview]]) -> T:
    if not isinstance(answer[0], cls):
        raise InternalError(f"expected {cls.__name__}, the shard sent {type(answer[0]).__name__}")
    return answer[0]


async def run_while_waiting(work: Coroutine[Any, Any, T], call: Callable[[], R]) -> tuple[T, R]:
    """Starts ``work`` and calls ``call`` as soon as ``work`` waits for something."""
    with unwrapped():
        async with TaskGroup() as tasks:
            working = tasks.create_task(work)
            await asyncio.sleep(0)
            result = call()
    return working.result(), result
