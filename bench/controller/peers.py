"""Fake rollouts, trainer and transferqueue of a controller, in one process.

They answer immediately or after a set time, and move no tensors. The controller sees the same
services and messages as from real ones, and samples with the same fields and tags.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import grpc

from services.common.fields import ROLLOUT_FIELDS
from services.weightsync.weight_plan import TensorSpec, make_plan, row_shards
from services.wire.batch import BlobRef, FieldColumn, KVBatchMeta
from slipstream.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from slipstream.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from slipstream.transferqueue.v1 import transferqueue_pb2 as tq
from slipstream.transferqueue.v1 import transferqueue_pb2_grpc
from slipstream.weightsync.v1 import weightsync_pb2 as ws
from slipstream.weightsync.v1 import weightsync_pb2_grpc

_TENSORS = (TensorSpec("weight", (8, 8), "float32"),)
_RESPONSE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class MadeGroup:
    """A group that a rollout has finished."""

    group: Any
    """The group as the controller requested it."""
    tokens: Sequence[int]
    """Length of each response."""
    oldest: int
    """Oldest weight version in the group."""
    newest: int
    """Newest weight version in the group."""


class FakeQueue(
    transferqueue_pb2_grpc.TransferQueueServiceServicer,
    transferqueue_pb2_grpc.SampleRecordServiceServicer,
):
    """Reports samples to watchers, but stores none."""

    def __init__(self) -> None:
        self._partitions: set[str] = set()
        self._waiting: dict[str, list[MadeGroup]] = defaultdict(list)
        self._arrived: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.version = 0

    def put(self, groups: Sequence[Any]) -> None:
        """Records samples of groups as stored."""
        for group in groups:
            tokens = (_RESPONSE_TOKENS,) * len(group.seeds)
            self.add(MadeGroup(group, tokens, oldest=self.version, newest=self.version))

    def add(self, group: "MadeGroup") -> None:
        """Records a finished group as stored."""
        partition = group.group.partition_id
        self._waiting[partition].append(group)
        self._arrived[partition].set()

    async def CreatePartition(self, request: Any, context: Any) -> Any:
        self._partitions.add(request.partition_id)
        return tq.CreatePartitionResponse()

    async def DropPartition(self, request: Any, context: Any) -> Any:
        self._partitions.discard(request.partition_id)
        return tq.DropPartitionResponse()

    async def RecordSamples(self, request: Any, context: Any) -> Any:
        return tq.RecordSamplesResponse()

    async def GetBatch(self, request: Any, context: Any) -> Any:
        empty = KVBatchMeta(partition_id=request.partition_id, keys=())
        return tq.GetBatchResponse(batch=empty.to_proto())

    async def ReleaseKeys(self, request: Any, context: Any) -> Any:
        return tq.ReleaseKeysResponse(key_count=len(request.keys))

    async def GetStats(self, request: Any, context: Any) -> Any:
        partition_stats = [tq.PartitionStats(partition_id=name) for name in self._partitions]
        return tq.GetStatsResponse(partitions=partition_stats)

    async def SaveSnapshot(self, request: Any, context: Any) -> Any:
        return tq.SaveSnapshotResponse()

    async def WatchBatches(self, request: Any, context: Any) -> AsyncIterator[Any]:
        partition = request.partition_id
        while True:
            await self._arrived[partition].wait()
            self._arrived[partition].clear()
            groups, self._waiting[partition] = self._waiting[partition], []
            if groups:
                meta = _meta(partition, groups)
                yield tq.WatchBatchesResponse(batch=meta.to_proto())

    async def WatchLostSamples(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()  # nothing is lost here
        yield tq.WatchLostSamplesResponse()


class FakeRollouts(rollout_pb2_grpc.RolloutServiceServicer):
    """Finishes each group after a time between two bounds."""

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
    """Reports every requested batch as trained."""

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
        tensor_specs = [ws.TensorSpec(name=t.name, shape=t.shape, dtype=t.dtype) for t in _TENSORS]
        return ws.DescribeWeightsResponse(tensors=tensor_specs, device="cpu")

    async def AgreePlan(self, request: Any, context: Any) -> Any:
        shards = row_shards(_TENSORS, request.source_count)
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
    """Adds all services to a server, with the queue."""
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(FakeRollouts(queue, seconds), server)
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(FakeTrainer(step_s), server)
    weightsync_pb2_grpc.add_WeightSyncServiceServicer_to_server(FakeWeights(queue), server)


def _meta(partition: str, groups: Sequence[MadeGroup]) -> KVBatchMeta:
    """Returns the description of groups' samples after one put, as a transferqueue makes it."""
    samples = [
        (made_group, member, tokens)
        for made_group in groups
        for member, tokens in zip(made_group.group.members, made_group.tokens, strict=True)
    ]
    size = len(samples)
    columns = tuple(
        FieldColumn(
            name=name,
            dtype="float32",
            row_rank=1,
            tail_shape=(),
            lengths=tuple(tokens for _, _, tokens in samples),
            blob_indexes=(index,) * size,
            offsets=tuple(accumulate((4 * t for _, _, t in samples[:-1]), initial=0)),
        )
        for index, name in enumerate(ROLLOUT_FIELDS)
    )
    size_bytes = sum(4 * tokens for _, _, tokens in samples)
    blobs = tuple(
        BlobRef(shard_id="s0", blob_id=index, size_bytes=size_bytes, checksum=index)
        for index in range(len(columns))
    )
    tags: dict[str, Any] = {
        "group_id": tuple(made_group.group.group_id for made_group, _, _ in samples),
        "member": tuple(member for _, member, _ in samples),
        "attempt": tuple(made_group.group.attempt for made_group, _, _ in samples),
        "reward": tuple(float(member % 2) for _, member, _ in samples),
        "terms": tuple(f'{{"exact_match": {member % 2}.0}}' for _, member, _ in samples),
        "finish_reason": ("stop",) * size,
        "data_source": ("bench",) * size,
        "v_min": tuple(made_group.oldest for made_group, _, _ in samples),
        "v_max": tuple(made_group.newest for made_group, _, _ in samples),
        "v_first": tuple(made_group.oldest for made_group, _, _ in samples),
        "response_tokens": tuple(tokens for _, _, tokens in samples),
    }
    numbers = {"num_segments": 1, "prompt_tokens": 16, "greedy": 0}
    tags |= {name: (value,) * size for name, value in numbers.items()}
    return KVBatchMeta(
        partition_id=partition,
        keys=tuple(f"{made_group.group.group_id}.{member}" for made_group, member, _ in samples),
        fields=columns,
        blobs=blobs,
        tags=tags,
    )
