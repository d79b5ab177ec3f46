"""Storage shards of a transferqueue: liveness, admitted clients, pending deletions and registration.

The index serves registrations over gRPC; the side of a shard whose index is remote is here, too.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from services.common.errors import NotFoundError, ServiceError
from services.common.messages import from_message
from services.common.task_group import TaskGroup, Waiters, unwrapped
from services.transferqueue import metrics
from services.transferqueue.index.index import Index
from services.transferqueue.storage.blobs import BlobStore
from services.transferqueue.storage.dataplane import ALL_RUNS
from services.wire.batch import BlobRef, KVBatchMeta
from services.wire.transferqueue.client import ShardRegistryClient
from services.wire.transferqueue.types import Shard, ShardStats
from slipstream.transferqueue.v1 import transferqueue_pb2 as pb
from slipstream.transferqueue.v1 import transferqueue_pb2_grpc as pb_grpc

HEARTBEAT_S = 1.0
"""Max seconds that a heartbeat waits for blobs to delete."""
DEAD_AFTER_S = 5.0
"""Seconds without a heartbeat after which a shard is given up."""
_CHANGED = "changed"
Context = grpc.aio.ServicerContext[Any, Any]
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Member:
    shard: Shard
    capacity_bytes: int
    stored_bytes: Callable[[], int]
    free: Callable[[Sequence[int]], None]
    timer: asyncio.TimerHandle | None = None
    reported_bytes: int = 0
    to_delete: list[int] = field(default_factory=list)
    num_deleted: int = 0
    reserved: set[str] = field(default_factory=set)
    """Puts that are charged and not visible."""


class Shards:
    """Shards of this process and of other processes.

    Args:
        index: Receives the ids of dead shards.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._members: dict[str, _Member] = {}
        self._clients: Counter[tuple[str, str]] = Counter()
        self._waiters = Waiters()
        self._num_keepers = 0
        self._deferred: list[BlobRef] = []

    def add_local(
        self,
        shard: Shard,
        *,
        capacity_bytes: int,
        stored_bytes: Callable[[], int],
        free: Callable[[Sequence[int]], None],
    ) -> None:
        """Adds the shard of this process, with functions that return its used bytes and delete blobs."""
        self._members[shard.shard_id] = _Member(shard, capacity_bytes, stored_bytes, free)
        self._notify_clients()

    def register(self, shard: Shard, *, capacity_bytes: int) -> None:
        """Adds the shard of another process. The data of its earlier lifetime is lost."""
        if shard.shard_id in self._members:
            self._remove_member(shard.shard_id)
        member = _Member(
            shard, capacity_bytes, lambda: member.reported_bytes, lambda blob_ids: None
        )

        def delete_blob(blob_ids: Sequence[int]) -> None:
            member.to_delete += blob_ids
            self._waiters.wake(shard.shard_id)

        member.free = delete_blob
        self._members[shard.shard_id] = member
        self._rewind(member)
        self._notify_clients()

    async def heartbeat(
        self, shard_id: str, *, instance_id: str, stored_bytes: int, num_deleted: int
    ) -> tuple[int, ...]:
        """Keeps a shard alive; waits a while for blobs to delete.

        Args:
            instance_id: Id of the current lifetime of its process.
            num_deleted: Number of blobs that the shard has deleted so far at the index's request.

        Returns:
            Ids of the blobs to delete after these.

        Raises:
            NotFoundError: If the shard was given up.
        """
        member = self.check_registered(shard_id, instance_id)
        self._rewind(member)
        member.reported_bytes = stored_bytes
        del member.to_delete[: num_deleted - member.num_deleted]
        member.num_deleted = num_deleted
        if not member.to_delete:
            await self._waiters.wait(shard_id, timeout_s=HEARTBEAT_S)
            self.check_registered(shard_id, instance_id)
        return tuple(member.to_delete)

    async def connect(
        self, public_key: str, run_id: str = ALL_RUNS
    ) -> AsyncGenerator[list[Shard], None]:
        """Admits a client while the generator runs; yields the shards at once and after each change.

        Args:
            public_key: CURVE key of the client.
        """
        client = (public_key, run_id)
        self._clients[client] += 1
        try:
            while True:
                yield self.list_shards()
                await self._waiters.wait(_CHANGED, timeout_s=None)
        finally:
            self._clients[client] -= 1
            if not self._clients[client]:
                del self._clients[client]

    async def admitted_as(self, public_key: str) -> str | None:
        """Returns the run of a client that may use the data sockets; None if it may not."""
        return next((run_id for key, run_id in self._clients if key == public_key), None)

    def list_shards(self) -> list[Shard]:
        return [member.shard for member in self._members.values()]

    def stats(self) -> list[ShardStats]:
        return [
            ShardStats(
                shard_id=shard_id,
                stored_bytes=member.stored_bytes(),
                capacity_bytes=member.capacity_bytes,
            )
            for shard_id, member in self._members.items()
        ]

    def free(self, blobs: Sequence[BlobRef]) -> None:
        """Deletes blobs on their shards; ignores those of dead shards."""
        if self._num_keepers:
            self._deferred += blobs
            return
        by_shard: dict[str, list[int]] = {}
        for blob in blobs:
            by_shard.setdefault(blob.shard_id, []).append(blob.blob_id)
        for shard_id, blob_ids in by_shard.items():
            if shard_id in self._members:
                self._members[shard_id].free(blob_ids)

    @contextmanager
    def defer_deletion(self) -> Iterator[None]:
        """Defers the deletion of blobs until the block ends."""
        self._num_keepers += 1
        try:
            yield
        finally:
            self._num_keepers -= 1
            deferred, self._deferred = self._deferred, []
            self.free(deferred)

    def _notify_clients(self) -> None:
        metrics.SHARDS.set(len(self._members))
        self._waiters.wake(_CHANGED)

    def check_registered(self, shard_id: str, instance_id: str) -> _Member:
        """Returns the shard if this lifetime of its process is registered.

        Raises:
            NotFoundError: If it was given up.
        """
        member = self._members.get(shard_id)
        if member is None or member.shard.instance_id != instance_id:
            raise NotFoundError(
                f"shard {shard_id} was removed after {DEAD_AFTER_S} s without heartbeat or has a "
                "successor; restart this process",
                shard_id=shard_id,
            )
        return member

    def _rewind(self, member: _Member) -> None:
        if member.timer is not None:
            member.timer.cancel()
        loop = asyncio.get_running_loop()
        member.timer = loop.call_later(DEAD_AFTER_S, self._remove_member, member.shard.shard_id)

    def _remove_member(self, shard_id: str) -> None:
        member = self._members.pop(shard_id)
        if member.timer is not None:
            member.timer.cancel()
        for put_id in member.reserved:
            self._index.cancel(put_id)
        self._index.remove_shard(shard_id)
        self._waiters.wake(shard_id)
        self._notify_clients()


class ShardRegistryServicer(pb_grpc.ShardRegistryServiceServicer):
    """Serves the shards of other processes."""

    def __init__(self, index: Index, shards: Shards) -> None:
        self._index = index
        self._shards = shards

    async def RegisterShard(
        self, request: pb.RegisterShardRequest, context: Context
    ) -> pb.RegisterShardResponse:
        shard = from_message(request.shard, Shard)
        self._shards.register(shard, capacity_bytes=request.capacity_bytes)
        return pb.RegisterShardResponse()

    async def HeartbeatShard(
        self, request: pb.HeartbeatShardRequest, context: Context
    ) -> pb.HeartbeatShardResponse:
        """Keeps a shard registered; returns the blobs that it must delete."""
        blob_ids = await self._shards.heartbeat(
            request.shard_id,
            instance_id=request.instance_id,
            stored_bytes=request.stored_bytes,
            num_deleted=request.deleted_count,
        )
        return pb.HeartbeatShardResponse(blob_ids=blob_ids)

    async def ReserveBytes(
        self, request: pb.ReserveBytesRequest, context: Context
    ) -> pb.ReserveBytesResponse:
        await self._index.reserve(
            request.put_id,
            request.partition_id,
            size_bytes=request.size_bytes,
            wait_s=request.wait_s,
        )
        try:
            self._member(request).reserved.add(request.put_id)
        except NotFoundError:
            self._index.cancel(request.put_id)
            raise
        return pb.ReserveBytesResponse()

    async def CancelBytes(
        self, request: pb.CancelBytesRequest, context: Context
    ) -> pb.CancelBytesResponse:
        self._member(request).reserved.discard(request.put_id)
        self._index.cancel(request.put_id)
        return pb.CancelBytesResponse()

    async def CommitPut(
        self, request: pb.CommitPutRequest, context: Context
    ) -> pb.CommitPutResponse:
        meta = KVBatchMeta.from_proto(request.batch)
        # Rejects a shard that was given up: its samples would never be reported as lost.
        member = self._member(request)
        revision = await self._index.commit(meta, put_id=request.put_id)
        member.reserved.discard(request.put_id)
        return pb.CommitPutResponse(revision=revision)

    async def CheckClient(
        self, request: pb.CheckClientRequest, context: Context
    ) -> pb.CheckClientResponse:
        """Returns True if a client is admitted, and its run."""
        run_id = await self._shards.admitted_as(request.public_key)
        return pb.CheckClientResponse(admitted=run_id is not None, run_id=run_id or "")

    def _member(
        self, request: pb.ReserveBytesRequest | pb.CancelBytesRequest | pb.CommitPutRequest
    ) -> _Member:
        return self._shards.check_registered(request.shard_id, request.instance_id)


class RemoteIndex:
    """Index of another process, as this shard uses it."""

    def __init__(self, client: ShardRegistryClient) -> None:
        self._client = client

    async def reserve(
        self, put_id: str, partition_id: str, *, size_bytes: int, wait_s: float
    ) -> None:
        await self._client.reserve(put_id, partition_id, size_bytes=size_bytes, wait_s=wait_s)

    def cancel(self, put_id: str) -> None:
        """Reverts the charge in the background."""
        self._tasks.create_task(self._cancel(put_id))

    async def commit(self, meta: KVBatchMeta, *, put_id: str) -> int:
        return await self._client.commit(meta, put_id=put_id)

    async def admitted_as(self, public_key: str) -> str | None:
        """Returns the run of a client that may use the data socket; None if it may not."""
        return await self._client.admitted_as(public_key)

    @asynccontextmanager
    async def registered(
        self, shard: Shard, storage: BlobStore, free: Callable[[Sequence[int]], None]
    ) -> AsyncIterator[None]:
        """Registers the shard and sends heartbeats until the block ends.

        Raises:
            NotFoundError: If the index gave this shard up. Its samples count as lost, so the
                process must end and restart.
        """
        await self._client.register(shard, capacity_bytes=storage.capacity_bytes)
        with unwrapped():
            async with TaskGroup() as self._tasks:
                beating = self._tasks.create_task(self._beat(storage, free))
                yield
                beating.cancel()

    async def _beat(self, storage: BlobStore, free: Callable[[Sequence[int]], None]) -> None:
        num_deleted = 0
        while True:
            blob_ids = await self._client.heartbeat(
                stored_bytes=storage.used_bytes, num_deleted=num_deleted
            )
            free(blob_ids)
            num_deleted += len(blob_ids)

    async def _cancel(self, put_id: str) -> None:
        try:
            await self._client.cancel(put_id)
        except ServiceError as error:
            # The index reverts the charge when it gives this shard up.
            logger.warning("quota was not returned", extra={"error": str(error)})
