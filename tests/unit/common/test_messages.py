"""Conversion between dataclasses and protobuf messages with the same fields."""

from dataclasses import replace

import pytest

from services.common.messages import from_message, to_message
from services.wire.batch import BlobRef, FieldColumn
from services.wire.controller import GroupFailure
from services.wire.transferqueue.types import AcquireRequest, PartitionStats, ShardStats
from services.wire.workers import GroupAssignment
from slipstream.controller.v1 import membership_pb2
from slipstream.rollout.v1 import rollout_pb2
from slipstream.transferqueue.v1 import transferqueue_pb2
from slipstream.type.v1 import batch_pb2

_VALUES = [
    (BlobRef(shard_id="a", blob_id=1, size_bytes=2, checksum=3), batch_pb2.BlobRef),
    (
        FieldColumn(
            name="n",
            dtype="float32",
            row_rank=1,
            tail_shape=(2,),
            lengths=(3, 4),
            blob_indexes=(0, -1),
            offsets=(5, 6),
        ),
        batch_pb2.FieldColumn,
    ),
    (
        GroupFailure(
            group_id="g",
            attempt=2,
            reason="r",
            message="m",
            retryable=True,
            num_unfinished=3,
            num_tokens=4,
        ),
        membership_pb2.GroupFailure,
    ),
    (
        GroupAssignment(
            group_id="g",
            attempt=1,
            split="train",
            row=5,
            partition_id="p",
            members=(0, 1),
            seeds=(7, 8),
            temperatures=(1.0, 0.5),
            first_attempt=1,
        ),
        rollout_pb2.GroupAssignment,
    ),
    (
        AcquireRequest(partition_id="p", consumer="c", fields=("x", "y"), num_keys=3),
        transferqueue_pb2.AcquireBatchRequest,
    ),
    (
        PartitionStats(
            partition_id="p",
            num_keys=1,
            num_ready=2,
            num_leased=3,
            stored_bytes=4,
            quota_bytes=5,
            revision=6,
        ),
        transferqueue_pb2.PartitionStats,
    ),
    (
        ShardStats(shard_id="s", stored_bytes=1, capacity_bytes=2),
        transferqueue_pb2.ShardStats,
    ),
]


@pytest.mark.parametrize(("value", "kind"), _VALUES, ids=lambda value: type(value).__name__)
def test_values_round_trip_through_messages(value, kind):
    parsed = kind.FromString(to_message(value, kind).SerializeToString())
    assert from_message(parsed, type(value)) == value


def test_given_values_override_fields_of_the_message():
    failure, kind = _VALUES[2]
    message = to_message(failure, kind, reason="other")
    assert from_message(message, GroupFailure, worker_id="rollout-0") == replace(
        failure, reason="other", worker_id="rollout-0"
    )


def test_a_message_with_a_field_that_the_dataclass_lacks_is_rejected():
    with pytest.raises(KeyError, match="partition_id"):
        from_message(transferqueue_pb2.PartitionStats(), ShardStats)
