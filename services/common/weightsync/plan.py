"""Where each tensor lies on the wire: pure functions, no torch.

All tensors of one version form one flat arena. Sender and receiver lay it out by the same rules from the
same list, so that a transfer is the arena, cut into buckets, and a received tensor is a view into it.

    arena   | q_proj | k_proj | pad | v_proj | ...           | norm |
    buckets |<- bucket_bytes ->|<- bucket_bytes ->| ... |<- rest ->|
"""

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 256
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
    """One tensor on the wire."""

    name: str
    """Name as in a Hugging Face checkpoint."""
    shape: tuple[int, ...]
    """Dimensions."""
    dtype: str
    """Element type on the wire, for example ``bfloat16``."""

    @property
    def num_bytes(self) -> int:
        """Size without padding."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A range of the arena that one collective moves."""

    start: int
    """First byte."""
    stop: int
    """Byte behind the last."""


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """The layout that all members of a weight group share."""

    tensors: tuple[TensorSpec, ...]
    """Tensors in sending order."""
    offsets: tuple[int, ...]
    """First byte of each tensor in the arena."""
    arena_bytes: int
    """Size of the arena, padding included."""
    buckets: tuple[Bucket, ...]
    """The arena, cut for sending."""
    plan_hash: str
    """SHA-256 of everything above, in hex: members with equal hashes agree on every byte."""


def make_plan(tensors: Sequence[TensorSpec], bucket_bytes: int) -> WeightPlan:
    """Lay out tensors and cut the arena into buckets.

    Args:
        tensors: In sending order.
        bucket_bytes: Most bytes of a bucket; rounded down to a multiple of the alignment.

    Raises:
        ValueError: If there is no tensor, a name comes twice, or an element type is unknown.
    """
    if not tensors:
        raise ValueError("a weight plan needs at least one tensor, but the list is empty")
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"tensor names must be unique, but these come twice: {twice[:5]}")
    unknown = sorted({tensor.dtype for tensor in tensors} - set(ELEMENT_BYTES))
    if unknown:
        raise ValueError(f"element types must be among {sorted(ELEMENT_BYTES)}, but got {unknown}")
    if bucket_bytes < ALIGNMENT:
        raise ValueError(f"bucket_bytes must be at least {ALIGNMENT}, but is {bucket_bytes}")
    sizes = [_aligned(tensor.num_bytes) for tensor in tensors]
    offsets = tuple(itertools.accumulate(sizes[:-1], initial=0))
    arena_bytes = offsets[-1] + sizes[-1]
    step = bucket_bytes // ALIGNMENT * ALIGNMENT
    buckets = tuple(
        Bucket(start, min(start + step, arena_bytes)) for start in range(0, arena_bytes, step)
    )
    described = json.dumps(
        [[tensor.name, tensor.shape, tensor.dtype] for tensor in tensors] + [[step]]
    )
    return WeightPlan(
        tensors=tuple(tensors),
        offsets=offsets,
        arena_bytes=arena_bytes,
        buckets=buckets,
        plan_hash=hashlib.sha256(described.encode()).hexdigest(),
    )


def _aligned(num_bytes: int) -> int:
    return -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT
