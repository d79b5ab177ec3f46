"""The way of a put through a shard: room, bytes, commit.

    Reserve  quota of the run, then room on the shard; waits for both
    Describe keys, fields and tags of the samples
    Write    frames fill the blobs (or the client fills them in the arena)
    Commit   checksums are compared, then the index makes the samples visible

A put that fails leaves nothing behind.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from services.common.batch import KVBatchMeta
from services.common.errors import (
    AbortedError,
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from services.common.fields import run_of
from services.transferqueue import metrics
from services.transferqueue.encoding import codec
from services.transferqueue.storage.blobs import BlobStore, Grant
from services.transferqueue.storage.ownership import Ownership, demand_run
from services.transferqueue.waiters import Waiters

_ROOM = "room"


class Metadata(Protocol):
    """The index as a shard sees it, in this process or in another."""

    async def reserve(self, partition_id: str, size_bytes: int, *, wait_s: float) -> None:
        """Charge the run's quota."""

    def cancel(self, partition_id: str, size_bytes: int) -> None:
        """Take the charge back, at once or soon."""

    async def commit(self, meta: KVBatchMeta, *, put_id: str) -> int:
        """Make a put visible; repeating it changes nothing."""


@dataclass(slots=True)
class _OpenPut:
    partition_id: str
    size_bytes: int
    grant: Grant
    timer: asyncio.TimerHandle
    meta: KVBatchMeta | None = None


class Puts:
    """Puts of one shard.

    Args:
        shard_id: Name of the shard.
        storage: Its blobs.
        metadata: The index.
    """

    def __init__(self, shard_id: str, storage: BlobStore, metadata: Metadata) -> None:
        self._shard_id = shard_id
        self._storage = storage
        self._metadata = metadata
        self._waiters = Waiters()
        self._open: dict[str, _OpenPut] = {}
        self._reserving: set[str] = set()
        self._given_up: set[str] = set()
        self._owners = Ownership()
        metrics.CAPACITY_BYTES.set(storage.capacity_bytes)

    def demand_own(self, run_id: str, request: codec.Request) -> None:
        """See that a request of a worker is about data of its run.

        Raises:
            PermissionDeniedError: If it is not.
        """
        match request:
            case codec.Reserve() | codec.Store():
                demand_run(run_id, run_of(request.partition_id))
            case codec.Describe() | codec.Commit() | codec.Abort():
                if (put := self._open.get(request.put_id)) is not None:
                    demand_run(run_id, run_of(put.partition_id))
            case codec.Write():
                self._owners.demand(run_id, (request.blob_id,))
            case codec.Read():
                self._owners.demand(run_id, request.ranges[::3])

    async def reserve(self, request: codec.Reserve) -> codec.Granted:
        """Find room, waiting for it.

        Raises:
            ResourceExhaustedError: If there was no room in time; says what is full.
            InvalidArgumentError: If there can never be room.
        """
        started = time.monotonic()
        size = sum(request.sizes)
        self._begin(request.put_id)
        try:
            await self._metadata.reserve(request.partition_id, size, wait_s=request.wait_s)
            try:
                grant = await self._find_room(request, started + request.wait_s)
            except BaseException:
                self._metadata.cancel(request.partition_id, size)
                raise
        finally:
            self._reserving.discard(request.put_id)
            self._given_up.discard(request.put_id)
        waited_s = time.monotonic() - started
        metrics.BACKPRESSURE.labels(run_of(request.partition_id)).inc(waited_s)
        timer = asyncio.get_running_loop().call_later(codec.GRANT_S, self._drop, request.put_id)
        self._owners.give(grant.blob_ids, run_of(request.partition_id))
        self._open[request.put_id] = _OpenPut(request.partition_id, size, grant, timer)
        metrics.STORED_BYTES.set(self._storage.used_bytes)
        return codec.Granted(grant.blob_ids, grant.positions)

    def describe(self, request: codec.Describe) -> None:
        """Take the description of a put that has its room.

        Raises:
            InvalidArgumentError: If it is malformed or about another partition.
        """
        put = self._open.get(request.put_id)
        if put is None:
            # It was aborted or took too long; its commit says so.
            return
        meta = KVBatchMeta.from_bytes(request.meta)
        if meta.partition_id != put.partition_id or len(meta.blobs) != len(put.grant.blob_ids):
            raise InvalidArgumentError(
                f"put {request.put_id} reserved {len(put.grant.blob_ids)} blobs in "
                f"{put.partition_id}, not {len(meta.blobs)} in {meta.partition_id}"
            )
        put.meta = meta

    async def commit(self, request: codec.Commit) -> codec.Committed:
        """End a put.

        Raises:
            ServiceError: If bytes are damaged or the put breaks a rule; nothing of it stays.
        """
        return codec.Committed(await self._finish(request.put_id, request.checksums))

    async def store(self, request: codec.Store, data: memoryview) -> codec.Stored:
        """A small put in one message.

        Raises:
            ServiceError: As ``reserve`` and ``commit``.
        """
        if len(data) != sum(request.sizes) or len(data) > codec.STORE_BYTES:
            raise InvalidArgumentError(
                f"{len(data)} bytes for blobs of {sum(request.sizes)}, at most {codec.STORE_BYTES}"
            )
        granted = await self.reserve(
            codec.Reserve(request.put_id, request.partition_id, request.sizes, request.wait_s)
        )
        try:
            self.describe(codec.Describe(request.put_id, request.meta))
        except InvalidArgumentError:
            self._drop(request.put_id)
            raise
        begin = 0
        for blob_id, size in zip(granted.blob_ids, request.sizes, strict=True):
            self._storage.write(blob_id, 0, data[begin : begin + size])
            begin += size
        revision = await self._finish(request.put_id, request.checksums)
        return codec.Stored(granted.blob_ids, revision)

    async def abort(self, request: codec.Abort) -> codec.Committed:
        """Give up a put that waits for room or has it; any other is left as it is."""
        if request.put_id in self._reserving:
            self._given_up.add(request.put_id)
            self._waiters.wake(_ROOM)
        self._drop(request.put_id)
        return codec.Committed(0)

    def free(self, blob_ids: Sequence[int]) -> None:
        """Delete blobs and let waiting puts in."""
        self._storage.free(blob_ids)
        self._owners.forget(blob_ids)
        metrics.STORED_BYTES.set(self._storage.used_bytes)
        self._waiters.wake(_ROOM)

    async def _finish(self, put_id: str, checksums: Sequence[int]) -> int:
        put = self._open.pop(put_id, None)
        if put is None:
            raise FailedPreconditionError(
                f"put {put_id} has no room: it was never reserved, was aborted, or took longer than "
                f"{codec.GRANT_S} s; reserve again",
                put_id=put_id,
            )
        put.timer.cancel()
        try:
            meta = self._complete(put, checksums)
            await self._storage.seal(meta.blobs)
            return await self._metadata.commit(meta, put_id=put_id)
        except (DeadlineExceededError, UnavailableError):
            # The put may be visible, so its bytes stay. The index is out of reach: it will give this
            # shard up, or know the put.
            raise
        except BaseException:
            self._undo(put)
            raise

    def _complete(self, put: _OpenPut, checksums: Sequence[int]) -> KVBatchMeta:
        if put.meta is None or len(checksums) != len(put.meta.blobs):
            raise InvalidArgumentError(
                f"a put is described before its commit, which has one checksum for each of its "
                f"{len(put.grant.blob_ids)} blobs, not {len(checksums)}"
            )
        blobs = [
            replace(blob, shard_id=self._shard_id, blob_id=blob_id, checksum=checksum)
            for blob, blob_id, checksum in zip(
                put.meta.blobs, put.grant.blob_ids, checksums, strict=True
            )
        ]
        return replace(put.meta, blobs=tuple(blobs))

    def _drop(self, put_id: str) -> None:
        put = self._open.pop(put_id, None)
        if put is not None:
            put.timer.cancel()
            self._undo(put)

    def _undo(self, put: _OpenPut) -> None:
        self.free(put.grant.blob_ids)
        self._metadata.cancel(put.partition_id, put.size_bytes)

    def _begin(self, put_id: str) -> None:
        if put_id in self._open or put_id in self._reserving:
            raise AlreadyExistsError(f"put {put_id} has its room already", put_id=put_id)
        self._reserving.add(put_id)

    async def _find_room(self, request: codec.Reserve, deadline: float) -> Grant:
        while True:
            if request.put_id in self._given_up:
                raise AbortedError(f"put {request.put_id} was given up", put_id=request.put_id)
            grant = self._storage.reserve(request.sizes)
            if grant is not None:
                return grant
            if await self._storage.make_room(sum(request.sizes)):
                continue
            rest_s = deadline - time.monotonic()
            if rest_s <= 0:
                used, capacity = self._storage.used_bytes, self._storage.capacity_bytes
                raise ResourceExhaustedError(
                    f"shard {self._shard_id}: {used} of {capacity} bytes are in use and "
                    f"{sum(request.sizes)} more did not fit within {request.wait_s} s; they fit "
                    "when samples are released",
                    shard_id=self._shard_id,
                    used_bytes=used,
                    capacity_bytes=capacity,
                )
            await self._waiters.wait(_ROOM, timeout_s=rest_s)
