"""Requests and results of the metadata service as plain Python types."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from services.wire.batch import KVBatchMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquireRequest:
    """Request of a consumer to lease samples."""

    partition_id: str
    consumer: str
    """Name of the use; each consumer receives each sample once."""
    fields: tuple[str, ...]
    """Fields that a sample needs; the same in every request of a consumer."""
    num_keys: int
    """Number of samples; the index leases all of them or none."""
    group_size: int = 0
    """Samples per group if only whole groups count; 0 ignores groups."""
    lease_s: float = 600.0
    """Seconds until the index delivers unacknowledged samples again."""
    wait_s: float = 0.0
    """Max seconds to wait for enough samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStats:
    """Number and size of the samples in a partition."""

    partition_id: str
    num_keys: int
    num_ready: int
    num_leased: int
    stored_bytes: int
    quota_bytes: int
    """Max bytes of all partitions of the run; 0 without a quota."""
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Address of a storage shard."""

    shard_id: str
    endpoint: str
    """ZeroMQ endpoint."""
    public_key: str = ""
    """CURVE public key in Z85; empty if the socket is not encrypted."""
    arena_socket: str = ""
    """Unix socket that passes on the shard's shared memory; empty if there is none."""
    instance_id: str = ""
    """Identifies one lifetime of the shard's process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStats:
    """Used and total bytes of a shard."""

    shard_id: str
    stored_bytes: int
    """Bytes in use, including reservations."""
    capacity_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Fill of all partitions and shards."""

    partitions: tuple[PartitionStats, ...]
    shards: tuple[ShardStats, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LostSamples:
    """Samples that disappeared with a shard."""

    keys: tuple[str, ...]
    """Lost samples that no consumer had acknowledged."""
    shard_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionImage:
    """Full metadata of a partition, for a snapshot."""

    partition_id: str
    required_fields: tuple[str, ...]
    quota_bytes: int
    puts: tuple[KVBatchMeta, ...]
    """Descriptions of the samples; within one of them, each field lies in one blob."""
    acked: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]
    """Fields and acknowledged keys of each consumer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRecordQuery:
    """Selects the sample records of a run and the parts of them to read."""

    split: str = ""
    """``train`` or ``heldout``; empty for both."""
    step: int | None = None
    """Step that trained the samples, or the weight version that was evaluated."""
    weight_version: int | None = None
    """Version that sampled at least one of a sample's tokens."""
    group_id: str = ""
    row: int | None = None
    """Row of the prompt in the data."""
    min_reward: float | None = None
    max_reward: float | None = None
    finish_reason: str = ""
    text: str = ""
    """Substring of the prompt or response."""
    order_by: Literal["newest", "best", "worst"] = "newest"
    sample_id: str = ""
    """Id of a single sample; empty for all."""
    after: str = ""
    """Id of the sample after which the result begins."""
    limit: int = 0
    """Max number of samples; 0 for all."""
    excerpt: int | None = None
    """Max characters of prompt and response; None for their full text."""
    with_turns: bool = False
    with_tokens: bool = False
