"""Typed client of the metadata service; it does not handle tensors."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict

import grpc

from services.common.errors import from_rpc_error
from services.common.messages import from_message, to_message
from services.common.rpc.client import TIMEOUT_S, call, open_channel
from services.wire.batch import KVBatchMeta
from services.wire.transferqueue.types import (
    AcquireRequest,
    LostSamples,
    PartitionStats,
    SampleRecordQuery,
    Shard,
    ShardStats,
    Stats,
)
from slipstream.transferqueue.v1 import transferqueue_pb2 as pb
from slipstream.transferqueue.v1 import transferqueue_pb2_grpc as pb_grpc


class ShardRegistryClient:
    """Calls the index on behalf of a shard in another process.

    Args:
        instance_id: Identifies one lifetime of the shard's process; the index rejects requests of a
            lifetime that it has given up.
    """

    def __init__(self, channel: grpc.aio.Channel, shard_id: str, instance_id: str) -> None:
        self._life = {"shard_id": shard_id, "instance_id": instance_id}
        self._stub = pb_grpc.ShardRegistryServiceStub(channel)

    async def register(self, shard: Shard, *, capacity_bytes: int) -> None:
        request = pb.RegisterShardRequest(
            shard=to_message(shard, pb.Shard), capacity_bytes=capacity_bytes
        )
        await call(self._stub.RegisterShard, request, idempotent=True)

    async def heartbeat(self, *, stored_bytes: int, num_deleted: int) -> tuple[int, ...]:
        """Keeps the shard registered; returns the blobs to delete after the first ``num_deleted``.

        Raises:
            NotFoundError: If the index gave the shard up.
        """
        request = pb.HeartbeatShardRequest(
            **self._life, stored_bytes=stored_bytes, deleted_count=num_deleted
        )
        response = await call(self._stub.HeartbeatShard, request, idempotent=True)
        return tuple(response.blob_ids)

    async def reserve(
        self, put_id: str, partition_id: str, *, size_bytes: int, wait_s: float
    ) -> None:
        """Charges the quota of a run for a put; waits until there is space."""
        request = pb.ReserveBytesRequest(
            **self._life,
            put_id=put_id,
            partition_id=partition_id,
            size_bytes=size_bytes,
            wait_s=wait_s,
        )
        await call(self._stub.ReserveBytes, request, timeout_s=wait_s + TIMEOUT_S)

    async def cancel(self, put_id: str) -> None:
        """Reverts the charge of ``reserve``, if there is one."""
        request = pb.CancelBytesRequest(**self._life, put_id=put_id)
        await call(self._stub.CancelBytes, request, idempotent=True)

    async def commit(self, meta: KVBatchMeta, *, put_id: str) -> int:
        """Makes a put visible; returns the partition's revision."""
        request = pb.CommitPutRequest(**self._life, put_id=put_id, batch=meta.to_proto())
        response = await call(self._stub.CommitPut, request, idempotent=True)
        return response.revision

    async def admitted_as(self, public_key: str) -> str | None:
        """Returns the run of a client that may use the data sockets; None if it may not."""
        request = pb.CheckClientRequest(public_key=public_key)
        response = await call(self._stub.CheckClient, request, idempotent=True)
        return response.run_id if response.admitted else None


_SNAPSHOT_TIMEOUT_S = 600.0
# Covers a whole export.
_READ_TIMEOUT_S = 3600.0


class TransferQueueClient:
    """Calls a transferqueue's metadata service.

    Args:
        channel: gRPC channel to the service; see ``connect``.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = pb_grpc.TransferQueueServiceStub(channel)
        self._records = pb_grpc.SampleRecordServiceStub(channel)

    @classmethod
    @asynccontextmanager
    async def connect(cls, address: str) -> AsyncIterator["TransferQueueClient"]:
        """Connects to the service at ``host:port``; the connection closes when the block ends."""
        async with open_channel(address, "transferqueue") as channel:
            yield cls(channel)

    async def create_partition(
        self,
        partition_id: str,
        *,
        required_fields: Sequence[str],
        quota_bytes: int = 0,
    ) -> None:
        """Creates a partition; a repeated call changes nothing.

        Args:
            partition_id: Run and purpose, for example ``run_1/train``.
            required_fields: Fields that a sample needs before watchers see it.
            quota_bytes: Max bytes of the run's samples; 0 sets no quota. The partitions of a run
                share the largest quota that one of them sets.

        Raises:
            FailedPreconditionError: If it exists with other required fields.
        """
        request = pb.CreatePartitionRequest(
            partition_id=partition_id,
            required_fields=required_fields,
            quota_bytes=quota_bytes,
        )
        await call(self._stub.CreatePartition, request, idempotent=True)

    async def drop_partition(self, partition_id: str) -> int:
        """Drops a partition and its samples; returns the number of samples."""
        request = pb.DropPartitionRequest(partition_id=partition_id)
        response = await call(self._stub.DropPartition, request, idempotent=True)
        return response.key_count

    async def get_batch(self, partition_id: str, keys: Sequence[str] = ()) -> KVBatchMeta:
        """Describes samples by key, in the order of the keys; without keys all samples, oldest first.

        Raises:
            NotFoundError: If the partition or a key does not exist; ``metadata["keys"]`` lists the
                missing keys.
        """
        request = pb.GetBatchRequest(partition_id=partition_id, keys=keys)
        response = await call(self._stub.GetBatch, request, idempotent=True)
        return KVBatchMeta.from_proto(response.batch)

    async def watch(self, partition_id: str, revision: int = 0) -> AsyncIterator[KVBatchMeta]:
        """Streams samples that have all required fields, when they become complete or change.

        The stream begins with the samples that changed after ``revision``. After a broken
        connection, resume from the revision of the last meta.

        Raises:
            NotFoundError: If the partition does not exist or is dropped.
            UnavailableError: If the connection breaks.
        """
        request = pb.WatchBatchesRequest(partition_id=partition_id, revision=revision)
        try:
            async for response in self._stub.WatchBatches(request):
                yield KVBatchMeta.from_proto(response.batch)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, "WatchBatches of the transferqueue") from error

    async def watch_lost_samples(self, partition_id: str) -> AsyncIterator[LostSamples]:
        """Streams samples that are lost with a shard before they were acknowledged.

        The stream begins with all earlier losses of the partition.

        Raises:
            NotFoundError: If the partition does not exist or is dropped.
            UnavailableError: If the connection breaks.
        """
        request = pb.WatchLostSamplesRequest(partition_id=partition_id)
        try:
            async for response in self._stub.WatchLostSamples(request):
                yield LostSamples(keys=tuple(response.keys), shard_id=response.shard_id)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, "WatchLostSamples of the transferqueue") from error

    async def acquire(self, request: AcquireRequest) -> KVBatchMeta:
        """Leases samples; waits until there are enough.

        Returns:
            The samples with their lease.

        Raises:
            DeadlineExceededError: If there were not enough in time; nothing is leased.
        """
        message = to_message(request, pb.AcquireBatchRequest)
        response = await call(
            self._stub.AcquireBatch, message, timeout_s=request.wait_s + TIMEOUT_S
        )
        return KVBatchMeta.from_proto(response.batch)

    async def ack(self, meta: KVBatchMeta) -> None:
        """Acknowledges that the samples of an acquired batch were used.

        Raises:
            FailedPreconditionError: If the lease expired and the samples were delivered again.
        """
        request = pb.AckLeaseRequest(partition_id=meta.partition_id, lease_id=meta.lease_id)
        await call(self._stub.AckLease, request, idempotent=True)

    async def release(
        self, partition_id: str, keys: Sequence[str], attempts: Sequence[int] = ()
    ) -> int:
        """Deletes samples; returns how many.

        Args:
            attempts: Newest attempt to delete, one for each key; samples of later ones stay.
        """
        request = pb.ReleaseKeysRequest(partition_id=partition_id, keys=keys, attempts=attempts)
        response = await call(self._stub.ReleaseKeys, request, idempotent=True)
        return response.key_count

    async def stats(self) -> Stats:
        """Returns the fill of partitions and shards."""
        response = await call(self._stub.GetStats, pb.GetStatsRequest(), idempotent=True)
        return Stats(
            partitions=tuple(from_message(stats, PartitionStats) for stats in response.partitions),
            shards=tuple(from_message(stats, ShardStats) for stats in response.shards),
        )

    async def connect_client(self, public_key: str = "") -> AsyncIterator[tuple[Shard, ...]]:
        """Admits the caller to the data sockets for as long as the stream is open.

        Args:
            public_key: CURVE public key of the caller; empty if the sockets are not encrypted.

        Yields:
            The shards, at once and after each change.

        Raises:
            UnavailableError: If the connection breaks.
        """
        request = pb.ConnectClientRequest(public_key=public_key)
        try:
            async for response in self._stub.ConnectClient(request):
                yield tuple(from_message(shard, Shard) for shard in response.shards)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, "ConnectClient of the transferqueue") from error

    async def save_snapshot(self, run_id: str, snapshot_id: str) -> int:
        """Saves the samples of a run in the service's snapshot folder; returns their number.

        Args:
            snapshot_id: Name of the snapshot, for example that of the checkpoint it belongs to.
        """
        request = pb.SaveSnapshotRequest(run_id=run_id, snapshot_id=snapshot_id)
        response = await call(
            self._stub.SaveSnapshot, request, timeout_s=_SNAPSHOT_TIMEOUT_S, idempotent=True
        )
        return response.key_count

    async def restore_snapshot(self, run_id: str, snapshot_id: str) -> int:
        """Restores the samples of a run, which must have none; returns their number.

        Revisions start again, so watchers must follow from revision 0.

        Raises:
            NotFoundError: If there is no such snapshot.
            AlreadyExistsError: If the run has samples.
            DataLossError: If the snapshot is damaged.
        """
        request = pb.RestoreSnapshotRequest(run_id=run_id, snapshot_id=snapshot_id)
        response = await call(self._stub.RestoreSnapshot, request, timeout_s=_SNAPSHOT_TIMEOUT_S)
        return response.key_count

    async def record_samples(
        self, run_id: str, *, max_bytes: int, max_steps: int, directory: str = ""
    ) -> None:
        """Starts to record samples put into a run's partition ``records``; a repeated call sets new limits.

        Args:
            max_bytes: Max bytes of the run's sample records; the oldest are deleted first.
            max_steps: Number of newest steps whose samples stay; 0 for all.
            directory: URL in an object store to which they are uploaded; empty for none.
        """
        request = pb.RecordSamplesRequest(
            run_id=run_id, max_bytes=max_bytes, max_steps=max_steps, directory=directory
        )
        await call(self._records.RecordSamples, request, idempotent=True)

    async def sample_upload(self, run_id: str, *, wait_s: float = 0.0) -> tuple[bool, float, str]:
        """Returns the state of the uploads of a run's samples.

        Args:
            wait_s: Seconds within which a run that has ended may still upload.

        Returns:
            True if the store lacks samples of an ended run; for how many seconds uploads have failed, 0 if
            none fails; why.
        """
        request = pb.GetSampleUploadRequest(run_id=run_id, wait_s=wait_s)
        response = await call(
            self._records.GetSampleUpload, request, timeout_s=wait_s + TIMEOUT_S, idempotent=True
        )
        return response.is_pending, response.failing_s, response.cause

    async def read_sample_records(
        self, run_id: str, query: SampleRecordQuery
    ) -> AsyncIterator[bytes]:
        """Streams sample records as JSON lines, in chunks that may end within a line.

        Raises:
            NotFoundError: If the record of the sample ``query.after`` no longer exists.
            UnavailableError: If the connection breaks.
        """
        fields = {name: value for name, value in asdict(query).items() if value is not None}
        request = pb.ReadSampleRecordsRequest(run_id=run_id, **fields)
        try:
            async for response in self._records.ReadSampleRecords(request, timeout=_READ_TIMEOUT_S):
                yield response.lines
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, "ReadSampleRecords of the transferqueue") from error

    async def delete_sample_records(self, run_id: str, *, directory: str = "") -> None:
        request = pb.DeleteSampleRecordsRequest(run_id=run_id, directory=directory)
        await call(self._records.DeleteSampleRecords, request, idempotent=True)
