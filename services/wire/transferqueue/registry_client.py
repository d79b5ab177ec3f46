"""Typed client of the shard registry, used by shards that run outside the index process."""

import grpc

from services.common.messages import from_message, to_message
from services.common.rpc.client import call
from services.wire.batch import KVBatchMeta
from services.wire.transferqueue.types import ObjectStoreAddress, Shard
from slipstream.transferqueue.v1 import transferqueue_pb2 as pb
from slipstream.transferqueue.v1 import transferqueue_pb2_grpc as pb_grpc

_TIMEOUT_S = 30.0


class ShardRegistryClient:
    """Calls the index on behalf of a shard in another process.

    Args:
        channel: gRPC channel to the index.
        shard_id: Name of the shard.
        instance_id: Identifies one lifetime of the shard's process; the index rejects requests of a
            lifetime that it has given up.
    """

    def __init__(self, channel: grpc.aio.Channel, shard_id: str, instance_id: str) -> None:
        self._life = {"shard_id": shard_id, "instance_id": instance_id}
        self._stub = pb_grpc.ShardRegistryServiceStub(channel)

    async def register(self, shard: Shard, *, capacity_bytes: int) -> None:
        """Registers the shard with the index."""
        request = pb.RegisterShardRequest(
            shard=shard_to_proto(shard), capacity_bytes=capacity_bytes
        )
        await call(self._stub.RegisterShard, request, timeout_s=_TIMEOUT_S, idempotent=True)

    async def heartbeat(self, *, stored_bytes: int, num_deleted: int) -> tuple[int, ...]:
        """Keeps the shard registered; returns the blobs to delete after the first ``num_deleted``.

        Raises:
            NotFoundError: If the index gave the shard up.
        """
        request = pb.HeartbeatShardRequest(
            **self._life, stored_bytes=stored_bytes, deleted_count=num_deleted
        )
        response = await call(
            self._stub.HeartbeatShard, request, timeout_s=_TIMEOUT_S, idempotent=True
        )
        return tuple(response.blob_ids)

    async def reserve(self, partition_id: str, size_bytes: int, *, wait_s: float) -> None:
        """Charges the quota of a run; waits until there is space."""
        request = pb.ReserveBytesRequest(
            **self._life, partition_id=partition_id, size_bytes=size_bytes, wait_s=wait_s
        )
        await call(self._stub.ReserveBytes, request, timeout_s=wait_s + _TIMEOUT_S)

    async def cancel(self, partition_id: str, size_bytes: int) -> None:
        """Reverts a charge of ``reserve``."""
        request = pb.CancelBytesRequest(
            **self._life, partition_id=partition_id, size_bytes=size_bytes
        )
        await call(self._stub.CancelBytes, request, timeout_s=_TIMEOUT_S)

    async def commit(self, meta: KVBatchMeta, *, put_id: str) -> int:
        """Makes a put visible; returns the partition's revision."""
        request = pb.CommitPutRequest(**self._life, put_id=put_id, batch=meta.to_proto())
        response = await call(self._stub.CommitPut, request, timeout_s=_TIMEOUT_S, idempotent=True)
        return response.revision

    async def admitted_as(self, public_key: str) -> str | None:
        """Returns the run of a client that may use the data sockets; None if it may not."""
        request = pb.CheckClientRequest(public_key=public_key)
        response = await call(
            self._stub.CheckClient, request, timeout_s=_TIMEOUT_S, idempotent=True
        )
        return response.run_id if response.admitted else None


def shard_to_proto(shard: Shard) -> pb.Shard:
    """Converts a shard to its wire form."""
    store = shard.object_store
    address = None if store is None else to_message(store, pb.ObjectStoreAddress)
    return to_message(shard, pb.Shard, object_store=address)


def shard_from_proto(proto: pb.Shard) -> Shard:
    """Converts a shard from its wire form."""
    store = proto.object_store
    address = from_message(store, ObjectStoreAddress) if store.master else None
    return from_message(proto, Shard, object_store=address)
