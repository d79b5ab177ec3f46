"""Layout of tensors on the wire: pure functions, no torch.

A trainer of several ranks holds each tensor in shards of whole rows, on all ranks or on those of
one pipeline stage. Every rank sends its own shards, so each rank is a source with its own flat
arena. All members lay out the arenas by the same rules from the same list: a transfer is the
arenas, cut into buckets, and received arenas need no unpacking.

    source 0   | q_proj rows 0-1023    | pad | k_proj rows 0-127   | ...
    source 1   | q_proj rows 1024-2047 | pad | k_proj rows 128-255 | ...
    buckets    |<---- bucket_bytes --->|<---- bucket_bytes ---->|<- rest ->|
"""

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

LORA_DOWN, LORA_UP = ".lora_A.weight", ".lora_B.weight"
ALIGNMENT = 256
# Buckets end at multiples of this, so that a checksum can read them as rows of words.
BUCKET_ALIGNMENT = 8192
ELEMENT_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and dtype of one tensor on the wire."""

    name: str
    """Name as in a Hugging Face checkpoint."""
    shape: tuple[int, ...]
    """Dimensions."""
    dtype: str
    """Element type on the wire, for example ``bfloat16``."""
    holders: tuple[int, ...] = ()
    """Sources among which the rows are divided, in the order of their rows; empty for all sources."""

    @property
    def num_rows(self) -> int:
        """Size of the first dimension; a scalar has one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class WeightShard:
    """Range of rows of one tensor."""

    tensor: int
    """Index into the plan's tensors."""
    start: int
    """First row."""
    stop: int
    """Row after the last."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Range of an arena that one collective sends."""

    start: int
    """First byte."""
    stop: int
    """Byte after the last."""


@dataclass(frozen=True, slots=True)
class Source:
    """Layout of the arena that one trainer rank sends."""

    shards: tuple[WeightShard, ...]
    """Shards in sending order."""
    offsets: tuple[int, ...]
    """First byte of each shard in the arena."""
    arena_bytes: int
    """Size of the arena, including padding."""
    buckets: tuple[Bucket, ...]
    """Ranges of the arena, one per collective."""


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Layout that all members of a weight group share."""

    tensors: tuple[TensorSpec, ...]
    """All tensors, in sending order."""
    sources: tuple[Source, ...]
    """One source per sending rank."""
    plan_hash: str
    """SHA-256 of tensors, shards and bucket size, in hex: members with equal hashes agree on every byte."""

    @property
    def num_bytes(self) -> int:
        return sum(source.arena_bytes for source in self.sources)


def row_shards(
    tensors: Sequence[TensorSpec], num_sources: int
) -> tuple[tuple[WeightShard, ...], ...]:
    """Returns the shards of each source: every holder of a tensor has ``ceil(rows / holders)`` of its rows.

    This is how FSDP2 divides a tensor. The last holders have fewer rows or none if the rows do not divide
    evenly.

    Raises:
        ValueError: If a tensor names a source that does not exist, or one of them twice.
    """
    sources: list[list[WeightShard]] = [[] for _ in range(num_sources)]
    for index, tensor in enumerate(tensors):
        holders = tensor.holders or range(num_sources)
        if len(set(holders)) < len(holders) or not set(holders) <= set(range(num_sources)):
            raise ValueError(
                f"holders of {tensor.name} must be different sources from 0 to {num_sources - 1}, got "
                f"{list(holders)}"
            )
        rows = -(-tensor.num_rows // len(holders))
        for number, holder in enumerate(holders):
            start, stop = (min(rows * n, tensor.num_rows) for n in (number, number + 1))
            if start < stop:
                sources[holder].append(WeightShard(index, start, stop))
    return tuple(tuple(shards) for shards in sources)


def make_plan(
    tensors: Sequence[TensorSpec],
    bucket_bytes: int,
    shards: Sequence[Sequence[WeightShard]] | None = None,
) -> WeightPlan:
    """Lays out tensors in arenas and cuts these into buckets.

    Args:
        tensors: Tensors in sending order.
        bucket_bytes: Max bytes of a bucket; rounded down to a multiple of 8 KiB.
        shards: Shards of each source; by default one source holds everything.

    Raises:
        ValueError: If there is no tensor, a name is repeated, an element type is unknown, a source
            has no shard, or the shards do not cover every row exactly once.
    """
    _check_tensors(tensors, bucket_bytes)
    if shards is None:
        shards = row_shards(tensors, 1)
    _check_shards(tensors, shards)
    step = bucket_bytes // BUCKET_ALIGNMENT * BUCKET_ALIGNMENT
    described = json.dumps(
        [
            [[tensor.name, tensor.shape, tensor.dtype] for tensor in tensors],
            [[[s.tensor, s.start, s.stop] for s in source] for source in shards],
            step,
        ]
    )
    return WeightPlan(
        tensors=tuple(tensors),
        sources=tuple(_bucket_layout(tensors, source, step) for source in shards),
        plan_hash=hashlib.sha256(described.encode()).hexdigest(),
    )


def version_digest(source_digests: Sequence[str]) -> str:
    """Returns the hex digest of a version from the digests of its sources, in order."""
    return hashlib.sha256(":".join(source_digests).encode()).hexdigest()


def _bucket_layout(
    tensors: Sequence[TensorSpec], shards: Sequence[WeightShard], step: int
) -> Source:
    offsets: list[int] = []
    end = 0
    for shard in shards:
        offsets.append(end)
        size = (shard.stop - shard.start) * tensors[shard.tensor].row_bytes
        end = _aligned(end + max(size, 1), ALIGNMENT)
    end = _aligned(end, BUCKET_ALIGNMENT)
    return Source(
        shards=tuple(shards),
        offsets=tuple(offsets),
        arena_bytes=end,
        buckets=tuple(Bucket(first, min(first + step, end)) for first in range(0, end, step)),
    )


def _check_tensors(tensors: Sequence[TensorSpec], bucket_bytes: int) -> None:
    if not tensors:
        raise ValueError("a weight plan needs at least one tensor, got none")
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"tensor names must be unique, got duplicates: {twice[:5]}")
    unknown = sorted({tensor.dtype for tensor in tensors} - set(ELEMENT_BYTES))
    if unknown:
        raise ValueError(f"dtypes must be among {sorted(ELEMENT_BYTES)}, got {unknown}")
    if bucket_bytes < BUCKET_ALIGNMENT:
        raise ValueError(f"bucket_bytes must be at least {BUCKET_ALIGNMENT}, got {bucket_bytes}")


def _check_shards(tensors: Sequence[TensorSpec], shards: Sequence[Sequence[WeightShard]]) -> None:
    if not all(shards):
        raise ValueError("every source needs at least one shard; remove ranks without shards")
    shards_by_tensor: dict[int, list[WeightShard]] = {index: [] for index in range(len(tensors))}
    for shard in itertools.chain.from_iterable(shards):
        shards_by_tensor[shard.tensor].append(shard)
    for index, tensor in enumerate(tensors):
        position = 0
        for shard in sorted(shards_by_tensor[index], key=lambda shard: shard.start):
            if shard.start != position:
                break
            position = shard.stop
        else:
            if position == tensor.num_rows:
                continue
        raise ValueError(
            f"the shards of {tensor.name} must cover its {tensor.num_rows} rows exactly once, but a row "
            f"near {position} is missing or duplicated"
        )


def _aligned(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment
