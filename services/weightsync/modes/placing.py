"""Copies received buckets into whole tensors, independent of the sources of their rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from services.weightsync.weight_plan import TensorSpec, WeightPlan

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class BucketPart:
    """The part of a tensor that lies in one bucket."""

    tensor: int
    """Index into the plan's tensors."""
    first: int
    """First byte in the tensor."""
    begin: int
    """First byte in the bucket."""
    end: int
    """Byte after the last in the bucket."""


def bucket_parts(plan: WeightPlan, source: int, index: int) -> Iterator[BucketPart]:
    """Yields the tensor parts in a bucket, without the gaps between them."""
    layout = plan.sources[source]
    bucket = layout.buckets[index]
    for shard, offset in zip(layout.shards, layout.offsets, strict=True):
        row_bytes = plan.tensors[shard.tensor].row_bytes
        size = (shard.stop - shard.start) * row_bytes
        begin, end = max(offset, bucket.start), min(offset + size, bucket.stop)
        if begin < end:
            first = shard.start * row_bytes + begin - offset
            yield BucketPart(shard.tensor, first, begin - bucket.start, end - bucket.start)


class Placer:
    """Copies a received bucket (source, index, bytes) into whole tensors.

    Args:
        targets: Bytes of each tensor of the plan, in its order: ``[n]`` uint8.
    """

    def __init__(self, plan: WeightPlan, targets: Sequence[Tensor]) -> None:
        self._plan = plan
        self._targets = targets

    @torch.no_grad()
    def __call__(self, source: int, index: int, bucket: Tensor) -> None:
        """Copies the tensor parts of one bucket to their rows."""
        for piece in bucket_parts(self._plan, source, index):
            target = self._targets[piece.tensor][
                piece.first : piece.first + piece.end - piece.begin
            ]
            target.copy_(bucket[piece.begin : piece.end])


def live_placer(plan: WeightPlan, live: Mapping[str, Tensor]) -> Placer:
    """Returns a placer into live tensors of this process.

    Args:
        live: Tensors by name.

    Raises:
        ValueError: If they differ from the plan, or are not contiguous.
    """
    return Placer(plan, [_flat_bytes(live.get(spec.name), spec) for spec in plan.tensors])


def whole_buffers(
    plan: WeightPlan, devices: Sequence[torch.device]
) -> tuple[Sequence[Tensor], Mapping[str, Tensor]]:
    """Allocates all tensors of a plan; returns the bytes of each, and each by name.

    Args:
        devices: Devices that share the tensors: each gets about as many bytes, of consecutive
            tensors.
    """
    sizes = [spec.row_bytes * (spec.shape[0] if spec.shape else 1) for spec in plan.tensors]
    padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    share = max(1, -(-sum(padded) // len(devices)))
    middles = [end - size // 2 for end, size in zip(accumulate(padded), padded, strict=True)]
    flat: list[Tensor] = []
    for number, device in enumerate(devices):
        owned = [index for index, middle in enumerate(middles) if middle // share == number]
        buffer = torch.empty(
            sum(padded[index] for index in owned), dtype=torch.uint8, device=device
        )
        buffers = buffer.split([padded[index] for index in owned])
        flat += [piece[: sizes[index]] for index, piece in zip(owned, buffers, strict=True)]
    tensors = {
        spec.name: piece.view(getattr(torch, spec.dtype)).view(spec.shape)
        for spec, piece in zip(plan.tensors, flat, strict=True)
    }
    return flat, tensors


def _flat_bytes(tensor: Tensor | None, spec: TensorSpec) -> Tensor:
    if tensor is None or tuple(tensor.shape) != spec.shape or not tensor.is_contiguous():
        raise ValueError(
            f"the engine has no contiguous tensor {spec.name!r} of shape {spec.shape}, so weights cannot be "
            "received in place; trainer and rollout need the same model"
        )
    if tensor.dtype != getattr(torch, spec.dtype):
        raise ValueError(
            f"{spec.name!r} arrives as {spec.dtype}, but the engine stores it as {tensor.dtype}, and mode "
            "inplace does not convert; use weight_sync.mode shadow, or the same trainer.dtype"
        )
    return tensor.detach().reshape(-1).view(torch.uint8)
