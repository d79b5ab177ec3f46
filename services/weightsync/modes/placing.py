"""Putting received buckets to where the tensors are whole, whichever rows came from which source."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from services.weightsync.plan import TensorSpec, WeightPlan

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class BucketPart:
    """A part of a tensor in a bucket."""

    tensor: int
    """Index into the plan's tensors."""
    first: int
    """First byte in the tensor."""
    begin: int
    """First byte in the bucket."""
    end: int
    """Byte behind the last in the bucket."""


def bucket_parts(plan: WeightPlan, source: int, index: int) -> Iterator[BucketPart]:
    """What lies in a bucket, without the gaps between tensors."""
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
        plan: The layout of what is received.
        targets: Bytes of each tensor of the plan, in its order: ``[n]`` uint8.
    """

    def __init__(self, plan: WeightPlan, targets: Sequence[Tensor]) -> None:
        self._plan = plan
        self._targets = targets

    @torch.no_grad()
    def __call__(self, source: int, index: int, received: Tensor) -> None:
        """Copy one bucket; parts of tensors that it holds go to their rows."""
        for part in bucket_parts(self._plan, source, index):
            target = self._targets[part.tensor][part.first : part.first + part.end - part.begin]
            target.copy_(received[part.begin : part.end])


def live_placer(plan: WeightPlan, live: Mapping[str, Tensor]) -> Placer:
    """Copies into live tensors of this process.

    Args:
        plan: The layout of what is received.
        live: Tensors by name.

    Raises:
        ValueError: If they are not those of the plan, or do not lie in one piece each.
    """
    return Placer(plan, [_flat_bytes(live.get(spec.name), spec) for spec in plan.tensors])


def whole_buffers(
    plan: WeightPlan, devices: Sequence[torch.device]
) -> tuple[Sequence[Tensor], Mapping[str, Tensor]]:
    """Room for all tensors of a plan: the bytes of each, and each by name.

    Args:
        plan: The layout.
        devices: Tensors are divided among them, neighbours together, so that each holds about as much.
    """
    sizes = [spec.row_bytes * (spec.shape[0] if spec.shape else 1) for spec in plan.tensors]
    places = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    share = max(1, -(-sum(places) // len(devices)))
    middles = [end - place // 2 for end, place in zip(accumulate(places), places, strict=True)]
    flat: list[Tensor] = []
    for number, device in enumerate(devices):
        mine = [index for index, middle in enumerate(middles) if middle // share == number]
        buffer = torch.empty(sum(places[index] for index in mine), dtype=torch.uint8, device=device)
        parts = buffer.split([places[index] for index in mine])
        flat += [part[: sizes[index]] for index, part in zip(mine, parts, strict=True)]
    tensors = {
        spec.name: part.view(getattr(torch, spec.dtype)).view(spec.shape)
        for spec, part in zip(plan.tensors, flat, strict=True)
    }
    return flat, tensors


def _flat_bytes(tensor: Tensor | None, spec: TensorSpec) -> Tensor:
    if tensor is None or tuple(tensor.shape) != spec.shape or not tensor.is_contiguous():
        raise ValueError(
            f"the engine has no contiguous tensor {spec.name!r} of shape {spec.shape}, so nothing can be "
            "received in place; trainer and rollout must be given the same model"
        )
    if tensor.dtype != getattr(torch, spec.dtype):
        raise ValueError(
            f"{spec.name!r} arrives as {spec.dtype}, but the engine keeps it as {tensor.dtype}; weights that "
            "are received in place are not converted: choose mode shadow, or the same trainer.dtype"
        )
    return tensor.detach().reshape(-1).view(torch.uint8)
