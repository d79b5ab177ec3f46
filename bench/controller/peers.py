"""Everything around a controller, as one process: fake rollouts, trainer and transferqueue.

They answer at once, or after a set time, and move no tensors; what the controller sees of them is what it
sees of real ones: the same services, the same messages, samples with the same fields and tags.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from services.common.batch import KVBatchMeta
from services.common.columns import BlobRef, FieldColumn
from services.common.fields import ROLLOUT_FIELDS
from services.common.weightsync.plan import TensorSpec, fsdp_shards, make_plan
from slipstream.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from slipstream.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from slipstream.transferqueue.v1 import transferqueue_pb2 as tq
from slipstream.transferqueue.v1 import transferqueue_pb2_grpc
from slipstream.weightsync.v1 import weightsync_pb2 as ws
from slipstream.weightsync.v1 import weightsync_pb2_grpc

_TENSORS = (TensorSpec("weight", (8, 8), "float32"),)
_RESPONSE_TOKENS = 64


class FakeQueue(transferqueue_pb2_grpc.TransferQueueServiceServicer):
    """Tells watchers of samples; holds none."""

    def __init__(self) -> None:
        self._partitions: set[str] = set()
        self._waiting: dict[str, list[Any]] = defaultdict(list)
        self._arrived: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.version = 0

    def put(self, groups: Sequence[Any]) -> None:
        """Samples of groups are stored."""
        partition = groups[0].partition_id
        self._waiting[partition] += groups
        self._arrived[partition].set()

    async def CreatePartition(self, request: Any, context: Any) -> Any:
        self._partitions.add(request.partition_id)
        return tq.CreatePartitionResponse()

    async def DropPartition(self, request: Any, context: Any) -> Any:
        self._partitions.discard(request.partition_id)
        return tq.DropPartitionResponse()

    async def GetBatch(self, request: Any, context: Any) -> Any:
        empty = KVBatchMeta(partition_id=request.partition_id, keys=())
        return tq.GetBatchResponse(batch=empty.to_proto())

    async def ReleaseKeys(self, request: Any, context: Any) -> Any:
        return tq.ReleaseKeysResponse(key_count=len(request.keys))

    async def GetStats(self, request: Any, context: Any) -> Any:
        found = [tq.PartitionStats(partition_id=name) for name in self._partitions]
        return tq.GetStatsResponse(partitions=found)

    async def SaveSnapshot(self, request: Any, context: Any) -> Any:
        return tq.SaveSnapshotResponse()

    async def WatchBatches(self, request: Any, context: Any) -> AsyncIterator[Any]:
        partition = request.partition_id
        while True:
            await self._arrived[partition].wait()
            self._arrived[partition].clear()
            groups, self._waiting[partition] = self._waiting[partition], []
            if groups:
                meta = _meta(partition, groups, self.version)
                yield tq.WatchBatchesResponse(batch=meta.to_proto())

    async def WatchLosses(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()  # nothing is lost here
        yield tq.WatchLossesResponse()


class FakeRollouts(rollout_pb2_grpc.RolloutServiceServicer):
    """Finishes groups, each after a time between two bounds."""

    def __init__(self, queue: FakeQueue, seconds: tuple[float, float]) -> None:
        self._queue = queue
        self._seconds = seconds
        self._random = random.Random(0)
        self.num_groups = 0

    async def StartGroups(self, request: Any, context: Any) -> Any:
        self.num_groups += len(request.groups)
        least, most = self._seconds
        loop = asyncio.get_running_loop()
        if most == 0.0 and request.groups:
            self._queue.put(request.groups)
        else:
            for group in request.groups:
                loop.call_later(self._random.uniform(least, most), self._queue.put, [group])
        return rollout_pb2.StartGroupsResponse()

    async def CancelGroups(self, request: Any, context: Any) -> Any:
        return rollout_pb2.CancelGroupsResponse()

    async def InterruptGroups(self, request: Any, context: Any) -> Any:
        return rollout_pb2.InterruptGroupsResponse()


class FakeTrainer(trainer_pb2_grpc.TrainerServiceServicer):
    """Has trained what it is asked to train."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.newest = 0

    async def TrainStep(self, request: Any, context: Any) -> Any:
        await asyncio.sleep(self._seconds)
        self.newest = request.step
        numbers = {"reward_mean": 0.5, "loss": 0.1, "staleness_max": 1.0, "staleness_mean": 1.0}
        return trainer_pb2.TrainStepResponse(step=request.step, metrics=numbers)

    async def GetNewestStep(self, request: Any, context: Any) -> Any:
        return trainer_pb2.GetNewestStepResponse(step=self.newest)

    async def SaveCheckpoint(self, request: Any, context: Any) -> Any:
        return trainer_pb2.SaveCheckpointResponse(path=f"step-{request.step:08d}")


class FakeWeights(weightsync_pb2_grpc.WeightSyncServiceServicer):
    """Agrees to every plan and has every version."""

    def __init__(self, queue: FakeQueue) -> None:
        self._queue = queue

    async def DescribeWeights(self, request: Any, context: Any) -> Any:
        found = [ws.TensorSpec(name=t.name, shape=t.shape, dtype=t.dtype) for t in _TENSORS]
        return ws.DescribeWeightsResponse(tensors=found)

    async def AgreePlan(self, request: Any, context: Any) -> Any:
        shards = fsdp_shards(_TENSORS, request.source_count)
        plan = make_plan(_TENSORS, request.bucket_bytes, shards)
        return ws.AgreePlanResponse(plan_hash=plan.plan_hash, device="cpu")

    async def FormGroup(self, request: Any, context: Any) -> Any:
        return ws.FormGroupResponse()

    async def PrepareTransfer(self, request: Any, context: Any) -> Any:
        return ws.PrepareTransferResponse(held_version=-1)

    async def TransferWeights(self, request: Any, context: Any) -> Any:
        return ws.TransferWeightsResponse(digests=["0" * 32], size_bytes=256)

    async def AdoptWeights(self, request: Any, context: Any) -> Any:
        self._queue.version = request.version
        return ws.AdoptWeightsResponse()

    async def ScoreWeights(self, request: Any, context: Any) -> Any:
        return ws.ScoreWeightsResponse()

    async def CheckWeights(self, request: Any, context: Any) -> Any:
        return ws.CheckWeightsResponse()

    async def AbortGroup(self, request: Any, context: Any) -> Any:
        return ws.AbortGroupResponse()


def add_services(
    server: grpc.aio.Server, queue: FakeQueue, *, seconds: tuple[float, float], step_s: float
) -> None:
    """Add all of them to a server, beside the queue."""
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(FakeRollouts(queue, seconds), server)
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(FakeTrainer(step_s), server)
    weightsync_pb2_grpc.add_WeightSyncServiceServicer_to_server(FakeWeights(queue), server)


def _meta(partition: str, groups: Sequence[Any], version: int) -> KVBatchMeta:
    """Samples of groups, as a transferqueue describes them after one put."""
    keys = tuple(f"{g.group_id}.{m}" for g in groups for m in range(len(g.seeds)))
    size = len(keys)
    members = [m for g in groups for m in range(len(g.seeds))]
    columns = tuple(
        FieldColumn(
            name=name,
            dtype="float32",
            row_rank=1,
            tail_shape=(),
            lengths=(_RESPONSE_TOKENS,) * size,
            blob_indexes=(index,) * size,
            offsets=tuple(range(0, 256 * size, 256)),
        )
        for index, name in enumerate(ROLLOUT_FIELDS)
    )
    blobs = tuple(
        BlobRef(shard_id="s0", blob_id=index, size_bytes=256 * size, checksum=index)
        for index in range(len(columns))
    )
    tags: dict[str, Any] = {
        "group_id": tuple(g.group_id for g in groups for _ in g.seeds),
        "member": tuple(members),
        "attempt": tuple(g.attempt for g in groups for _ in g.seeds),
        "reward": tuple(float(m % 2) for m in members),
        "finish_reason": ("stop",) * size,
        "data_source": ("bench",) * size,
    }
    numbers = {"v_min": version, "v_max": version, "v_first": version, "num_segments": 1}
    numbers |= {"prompt_tokens": 16, "response_tokens": _RESPONSE_TOKENS, "greedy": 0}
    tags |= {name: (value,) * size for name, value in numbers.items()}
    return KVBatchMeta(partition_id=partition, keys=keys, fields=columns, blobs=blobs, tags=tags)
