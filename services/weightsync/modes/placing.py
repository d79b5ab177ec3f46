"""Putting received buckets to where the tensors are whole, whichever rows came from which source."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from services.weightsync.plan import WeightPlan

_ALIGNMENT = 256


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
        layout = self._plan.sources[source]
        bucket = layout.buckets[index]
        for shard, offset in zip(layout.shards, layout.offsets, strict=True):
            spec = self._plan.tensors[shard.tensor]
            size = (shard.stop - shard.start) * spec.row_bytes
            begin, end = max(offset, bucket.start), min(offset + size, bucket.stop)
            if begin < end:
                first = shard.start * spec.row_bytes + begin - offset
                target = self._targets[shard.tensor][first : first + end - begin]
                target.copy_(received[begin - bucket.start : end - bucket.start])


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
