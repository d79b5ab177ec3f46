"""The way of a put through a shard: room, bytes, commit.

    Reserve  quota of the run, then room on the shard; waits for both
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
from services.transferqueue import metrics
from services.transferqueue.index.quotas import run_of
from services.transferqueue.storage.blobs import BlobStore, Grant
from services.transferqueue.storage.ownership import Ownership, demand_run
from services.transferqueue.transport import codec
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


@dataclass(frozen=True, slots=True)
class _OpenPut:
    partition_id: str
    size_bytes: int
    grant: Grant
    timer: asyncio.TimerHandle


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
            case codec.Commit() | codec.Abort():
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

    async def commit(self, request: codec.Commit) -> codec.Committed:
        """End a put.

        Raises:
            ServiceError: If bytes are damaged or the put breaks a rule; nothing of it stays.
        """
        return codec.Committed(await self._finish(request.put_id, _parse(request.meta)))

    async def store(self, request: codec.Store, data: memoryview) -> codec.Stored:
        """A small put in one message.

        Raises:
            ServiceError: As ``reserve`` and ``commit``.
        """
        if len(data) != sum(request.sizes) or len(data) > codec.STORE_BYTES:
            raise InvalidArgumentError(
                f"{len(data)} bytes for blobs of {sum(request.sizes)}, at most {codec.STORE_BYTES}"
            )
        meta = _parse(request.meta)
        if len(meta.blobs) != len(request.sizes):
            raise InvalidArgumentError(f"{len(request.sizes)} sizes for {len(meta.blobs)} blobs")
        granted = await self.reserve(
            codec.Reserve(request.put_id, request.partition_id, request.sizes, request.wait_s)
        )
        begin = 0
        for blob_id, size in zip(granted.blob_ids, request.sizes, strict=True):
            self._storage.write(blob_id, 0, data[begin : begin + size])
            begin += size
        blobs = [
            replace(blob, blob_id=blob_id)
            for blob, blob_id in zip(meta.blobs, granted.blob_ids, strict=True)
        ]
        revision = await self._finish(request.put_id, replace(meta, blobs=tuple(blobs)))
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

    async def _finish(self, put_id: str, meta: KVBatchMeta) -> int:
        put = self._open.pop(put_id, None)
        if put is None:
            raise FailedPreconditionError(
                f"put {put_id} has no room: it was never reserved, was aborted, or took longer than "
                f"{codec.GRANT_S} s; reserve again",
                put_id=put_id,
            )
        put.timer.cancel()
        try:
            self._check_owner(meta, put)
            await self._storage.seal(meta.blobs)
            return await self._metadata.commit(meta, put_id=put_id)
        except (DeadlineExceededError, UnavailableError):
            # The put may be visible, so its bytes stay. The index is out of reach: it will give this
            # shard up, or know the put.
            raise
        except BaseException:
            self._undo(put)
            raise

    def _check_owner(self, meta: KVBatchMeta, put: _OpenPut) -> None:
        blob_ids = tuple(blob.blob_id for blob in meta.blobs)
        is_ours = all(blob.shard_id == self._shard_id for blob in meta.blobs)
        if meta.partition_id != put.partition_id or blob_ids != put.grant.blob_ids or not is_ours:
            raise InvalidArgumentError(
                f"the put reserved other blobs, in partition {put.partition_id} of {self._shard_id}"
            )

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


def _parse(data: bytes) -> KVBatchMeta:
    try:
        return KVBatchMeta.from_bytes(data)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from error
