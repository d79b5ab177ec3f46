"""gRPC servicers of the index and of the sample records."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from services.common.errors import FailedPreconditionError
from services.common.fields import partition_id, run_of
from services.common.messages import from_message, to_message
from services.common.security.access import caller_run
from services.transferqueue.index.index import Index
from services.transferqueue.records.keeper import SampleRecordKeeper
from services.transferqueue.shards import Shards
from services.transferqueue.snapshots.snapshots import Snapshots
from services.transferqueue.storage.dataplane import ALL_RUNS
from services.wire.transferqueue.types import AcquireRequest, SampleRecordQuery
from slipstream.transferqueue.v1 import transferqueue_pb2 as pb
from slipstream.transferqueue.v1 import transferqueue_pb2_grpc as pb_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class TransferQueueServicer(pb_grpc.TransferQueueServiceServicer):
    """Serves the metadata of samples: converts wire types and delegates to the index."""

    def __init__(
        self, index: Index, shards: Shards, snapshots: Snapshots, keeper: SampleRecordKeeper
    ) -> None:
        self._index = index
        self._shards = shards
        self._snapshots = snapshots
        self._keeper = keeper

    async def CreatePartition(
        self, request: pb.CreatePartitionRequest, context: Context
    ) -> pb.CreatePartitionResponse:
        self._index.create_partition(
            request.partition_id,
            required_fields=tuple(request.required_fields),
            quota_bytes=request.quota_bytes,
        )
        return pb.CreatePartitionResponse()

    async def DropPartition(
        self, request: pb.DropPartitionRequest, context: Context
    ) -> pb.DropPartitionResponse:
        """Drops a partition and, if it holds sample records, first stores the pending ones."""
        if request.partition_id == partition_id(run_of(request.partition_id), "records"):
            await self._keeper.stop_recording(run_of(request.partition_id))
        return pb.DropPartitionResponse(key_count=self._index.drop_partition(request.partition_id))

    async def GetBatch(self, request: pb.GetBatchRequest, context: Context) -> pb.GetBatchResponse:
        meta = self._index.get(request.partition_id, tuple(request.keys))
        return pb.GetBatchResponse(batch=meta.to_proto())

    async def WatchBatches(
        self, request: pb.WatchBatchesRequest, context: Context
    ) -> AsyncIterator[pb.WatchBatchesResponse]:
        """Streams new and changed samples."""
        async for meta in self._index.watch(request.partition_id, request.revision):
            yield pb.WatchBatchesResponse(batch=meta.to_proto())

    async def WatchLostSamples(
        self, request: pb.WatchLostSamplesRequest, context: Context
    ) -> AsyncIterator[pb.WatchLostSamplesResponse]:
        async for loss in self._index.watch_lost_samples(request.partition_id):
            yield pb.WatchLostSamplesResponse(keys=loss.keys, shard_id=loss.shard_id)

    async def AcquireBatch(
        self, request: pb.AcquireBatchRequest, context: Context
    ) -> pb.AcquireBatchResponse:
        meta = await self._index.leasing.acquire(from_message(request, AcquireRequest))
        return pb.AcquireBatchResponse(batch=meta.to_proto())

    async def AckLease(self, request: pb.AckLeaseRequest, context: Context) -> pb.AckLeaseResponse:
        self._index.leasing.ack(request.partition_id, request.lease_id)
        return pb.AckLeaseResponse()

    async def ReleaseKeys(
        self, request: pb.ReleaseKeysRequest, context: Context
    ) -> pb.ReleaseKeysResponse:
        num_keys = self._index.release(
            request.partition_id, tuple(request.keys), tuple(request.attempts)
        )
        return pb.ReleaseKeysResponse(key_count=num_keys)

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        """Returns the fill of partitions and shards."""
        return pb.GetStatsResponse(
            partitions=[to_message(stats, pb.PartitionStats) for stats in self._index.stats()],
            shards=[to_message(stats, pb.ShardStats) for stats in self._shards.stats()],
        )

    async def ConnectClient(
        self, request: pb.ConnectClientRequest, context: Context
    ) -> AsyncIterator[pb.ConnectClientResponse]:
        """Admits a client to the data sockets and streams the list of shards."""
        run_id = caller_run()
        if run_id is not None and not self._index.has_run(run_id):
            raise FailedPreconditionError(
                f"{run_id} has no partitions here: it has not started yet, or has ended",
                run_id=run_id,
            )
        async for shards in self._shards.connect(request.public_key, run_id or ALL_RUNS):
            yield pb.ConnectClientResponse(shards=[to_message(shard, pb.Shard) for shard in shards])

    async def SaveSnapshot(
        self, request: pb.SaveSnapshotRequest, context: Context
    ) -> pb.SaveSnapshotResponse:
        num_keys, size = await self._snapshots.save(request.run_id, request.snapshot_id)
        return pb.SaveSnapshotResponse(key_count=num_keys, size_bytes=size)

    async def RestoreSnapshot(
        self, request: pb.RestoreSnapshotRequest, context: Context
    ) -> pb.RestoreSnapshotResponse:
        num_keys = await self._snapshots.restore(request.run_id, request.snapshot_id)
        return pb.RestoreSnapshotResponse(key_count=num_keys)


class SampleRecordServicer(pb_grpc.SampleRecordServiceServicer):
    """Serves the sample records."""

    def __init__(self, keeper: SampleRecordKeeper) -> None:
        self._keeper = keeper

    async def RecordSamples(
        self, request: pb.RecordSamplesRequest, context: Context
    ) -> pb.RecordSamplesResponse:
        await self._keeper.start_recording(
            request.run_id,
            max_bytes=request.max_bytes,
            max_steps=request.max_steps,
            directory=request.directory,
        )
        return pb.RecordSamplesResponse()

    async def GetSampleUpload(
        self, request: pb.GetSampleUploadRequest, context: Context
    ) -> pb.GetSampleUploadResponse:
        is_pending = not await self._keeper.wait_uploaded(request.run_id, request.wait_s)
        failing_s, cause = self._keeper.upload_failure(request.run_id)
        return pb.GetSampleUploadResponse(failing_s=failing_s, cause=cause, is_pending=is_pending)

    async def ReadSampleRecords(
        self, request: pb.ReadSampleRecordsRequest, context: Context
    ) -> AsyncIterator[pb.ReadSampleRecordsResponse]:
        fields = {field.name: value for field, value in request.ListFields()}
        async for lines in self._keeper.read(fields.pop("run_id", ""), SampleRecordQuery(**fields)):
            yield pb.ReadSampleRecordsResponse(lines=lines)

    async def DeleteSampleRecords(
        self, request: pb.DeleteSampleRecordsRequest, context: Context
    ) -> pb.DeleteSampleRecordsResponse:
        await self._keeper.delete(request.run_id, request.directory)
        return pb.DeleteSampleRecordsResponse()
