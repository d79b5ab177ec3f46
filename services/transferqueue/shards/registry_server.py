"""gRPC servicer of the shard registry."""

from typing import Any

import grpc

from services.common.errors import NotFoundError
from services.transferqueue.index.index import Index
from services.transferqueue.shards.shards import Shards
from services.wire.batch import KVBatchMeta
from services.wire.transferqueue.registry_client import shard_from_proto
from slipstream.transferqueue.v1 import transferqueue_pb2 as pb
from slipstream.transferqueue.v1 import transferqueue_pb2_grpc as pb_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class ShardRegistryServicer(pb_grpc.ShardRegistryServiceServicer):
    """Serves the shards of other processes.

    Args:
        index: Metadata of the samples.
        shards: The shards.
    """

    def __init__(self, index: Index, shards: Shards) -> None:
        self._index = index
        self._shards = shards

    async def RegisterShard(
        self, request: pb.RegisterShardRequest, context: Context
    ) -> pb.RegisterShardResponse:
        """Registers a shard."""
        shard = shard_from_proto(request.shard)
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
        """Charges a quota."""
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
        """Reverts a charge."""
        self._charge(request, request.partition_id, -request.size_bytes)
        self._index.cancel(request.partition_id, request.size_bytes)
        return pb.CancelBytesResponse()

    async def CommitPut(
        self, request: pb.CommitPutRequest, context: Context
    ) -> pb.CommitPutResponse:
        """Makes a put visible."""
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
        """Returns whether a client is admitted, and its run."""
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
