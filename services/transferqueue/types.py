"""What callers of the metadata service say and hear, in plain Python."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from services.common.batch import KVBatchMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquireRequest:
    """What a consumer asks for."""

    partition_id: str
    consumer: str
    """Kind of use; each consumer sees each sample once."""
    fields: tuple[str, ...]
    """Fields that a sample needs; the same in each request of a consumer."""
    num_keys: int
    """Samples wanted; all or none are leased."""
    group_size: int = 0
    """Samples per group if only whole groups count; 0 ignores groups."""
    lease_s: float = 600.0
    """Seconds until the samples are handed out again unless they are acknowledged."""
    wait_s: float = 0.0
    """Longest wait for enough samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStats:
    """Fill of a partition."""

    partition_id: str
    num_keys: int
    num_ready: int
    num_leased: int
    stored_bytes: int
    quota_bytes: int
    """Bytes that all partitions of the run may take; 0 without a quota."""
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStoreAddress:
    """How to reach Mooncake Store."""

    master: str
    """``host:port`` of its master."""
    protocol: str = "tcp"
    """``tcp`` or ``rdma``."""
    num_replicas: int = 1
    """Copies of each object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """How to reach a storage shard."""

    shard_id: str
    endpoint: str
    """ZeroMQ endpoint."""
    public_key: str = ""
    """CURVE public key in Z85; empty where the socket is not encrypted."""
    arena_socket: str = ""
    """Unix socket that hands out the memory; empty if there is none."""
    instance_id: str = ""
    """This life of the shard's process."""
    object_store: ObjectStoreAddress | None = None
    """Where its bytes are, when they are in Mooncake Store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStats:
    """Fill of a shard."""

    shard_id: str
    stored_bytes: int
    """Bytes in use, reservations included."""
    capacity_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Fill of a transferqueue."""

    partitions: tuple[PartitionStats, ...]
    shards: tuple[ShardStats, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LostSamples:
    """Samples that died with a shard."""

    keys: tuple[str, ...]
    """Samples that exist no more and that nobody had acknowledged."""
    shard_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionImage:
    """All that is known about a partition, for a snapshot."""

    partition_id: str
    required_fields: tuple[str, ...]
    quota_bytes: int
    puts: tuple[KVBatchMeta, ...]
    """The samples; in each of these metas a field lies in one blob."""
    acked: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]
    """By consumer: the fields that it asks for and the keys that it acknowledged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSampleQuery:
    """Which kept samples of a run are read, and what of them."""

    split: str = ""
    """``train`` or ``heldout``; empty for both."""
    step: int | None = None
    """Step that trained them, or the weight version that was evaluated."""
    weight_version: int | None = None
    """Version that sampled one of their tokens."""
    group_id: str = ""
    row: int | None = None
    """Row of their prompt in the data."""
    min_reward: float | None = None
    max_reward: float | None = None
    finish_reason: str = ""
    text: str = ""
    """Part of prompt or response."""
    order_by: Literal["newest", "best", "worst"] = "newest"
    sample_id: str = ""
    """One sample; empty for all."""
    after: str = ""
    """Sample behind which the reading begins."""
    limit: int = 0
    """Most samples; 0 for all."""
    excerpt: int | None = None
    """Most characters of prompt and response; None for all of them."""
    with_turns: bool = False
    with_tokens: bool = False
