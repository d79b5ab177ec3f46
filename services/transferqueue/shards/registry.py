"""Registration of shards: the index's gRPC service, and the side of a shard whose index is remote."""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from services.common.errors import NotFoundError, ServiceError
from services.common.messages import from_message
from services.common.task_group import TaskGroup, unwrapped
from services.transferqueue.index.index import Index
from services.transferqueue.shards.shards import Shards
from services.transferqueue.storage.blobs import BlobStore
from services.wire.batch import KVBatchMeta
from services.wire.transferqueue.client import ShardRegistryClient
from services.wire.transferqueue.types import Shard
from slipstream.transferqueue.v1 import transferqueue_pb2 as pb
from slipstream.transferqueue.v1 import transferqueue_pb2_grpc as pb_grpc

Context = grpc.aio.ServicerContext[Any, Any]


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
        size = request.size_bytes
        await self._index.reserve(request.partition_id, size, wait_s=request.wait_s)
        try:
            self._charge(request, request.partition_id, size)
        except NotFoundError:
            self._index.cancel(request.partition_id, size)
            raise
        return pb.ReserveBytesResponse()

    async def CancelBytes(
        self, request: pb.CancelBytesRequest, context: Context
    ) -> pb.CancelBytesResponse:
        self._charge(request, request.partition_id, -request.size_bytes)
        self._index.cancel(request.partition_id, request.size_bytes)
        return pb.CancelBytesResponse()

    async def CommitPut(
        self, request: pb.CommitPutRequest, context: Context
    ) -> pb.CommitPutResponse:
        meta = KVBatchMeta.from_proto(request.batch)
        # Otherwise the samples of a shard that was given up would never be reported as lost.
        self._shards.check_registered(request.shard_id, request.instance_id)
        revision = await self._index.commit(meta, put_id=request.put_id)
        size = sum(blob.size_bytes for blob in meta.blobs)
        self._charge(request, meta.partition_id, -size)
        return pb.CommitPutResponse(revision=revision)

    async def CheckClient(
        self, request: pb.CheckClientRequest, context: Context
    ) -> pb.CheckClientResponse:
        """Returns True if a client is admitted, and its run."""
        run_id = await self._shards.admitted_as(request.public_key)
        return pb.CheckClientResponse(admitted=run_id is not None, run_id=run_id or "")

    def _charge(
        self,
        request: pb.ReserveBytesRequest | pb.CancelBytesRequest | pb.CommitPutRequest,
        partition_id: str,
        size_bytes: int,
    ) -> None:
        self._shards.charge(
            request.shard_id, partition_id, size_bytes, instance_id=request.instance_id
        )


logger = logging.getLogger(__name__)


class RemoteIndex:
    """Index of another process, as this shard uses it."""

    def __init__(self, client: ShardRegistryClient) -> None:
        self._client = client

    async def reserve(self, partition_id: str, size_bytes: int, *, wait_s: float) -> None:
        """Charges the run's quota."""
        await self._client.reserve(partition_id, size_bytes, wait_s=wait_s)

    def cancel(self, partition_id: str, size_bytes: int) -> None:
        """Reverts the charge in the background."""
        self._tasks.create_task(self._cancel(partition_id, size_bytes))

    async def commit(self, meta: KVBatchMeta, *, put_id: str) -> int:
        return await self._client.commit(meta, put_id=put_id)

    async def admitted_as(self, public_key: str) -> str | None:
        """Returns the run of a client that may use the data socket; None if it may not."""
        return await self._client.admitted_as(public_key)

    @asynccontextmanager
    async def joined(
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

    async def _cancel(self, partition_id: str, size_bytes: int) -> None:
        try:
            await self._client.cancel(partition_id, size_bytes)
        except ServiceError as error:
            # The index reverts the charge when it gives this shard up.
            logger.warning("quota was not returned", extra={"error": str(error)})
