"""In-place weight transfer within one process, without a transport."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from torch import Tensor

from services.common.runspec.weight_modes import STAGING_SLOTS
from services.weightsync.arena import WeightArena
from services.weightsync.endpoints import Place
from services.weightsync.modes.base import pack_weights
from services.weightsync.modes.staged import Slots
from services.weightsync.weight_plan import TensorSpec, WeightPlan, make_plan, row_shards
from tests.helpers.weight_members import Source

OpenWeights = Callable[[WeightPlan, Sequence[Sequence[Tensor]]], Awaitable[Place]]


async def place_all(
    open_weights: OpenWeights,
    weights: Mapping[str, Tensor],
    *,
    num_sources: int,
    bucket_bytes: int = 8192,
    num_slots: int = STAGING_SLOTS,
) -> None:
    """Writes tensors of this process into weights in place, on the tensors' device.

    Args:
        open_weights: Method of an engine or a sink.
        weights: Tensors by name.
        num_sources: Number of simulated trainer ranks.
        bucket_bytes: Bytes of a bucket; the default is so small that a bucket may end within
            a row.
        num_slots: Number of buckets that the receiver holds.
    """
    device = next(iter(weights.values())).device
    specs = [
        TensorSpec(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
        for name, value in weights.items()
    ]
    plan = make_plan(specs, bucket_bytes, row_shards(specs, num_sources))
    slots = Slots(plan, device, count=num_slots)
    place_bucket = await open_weights(plan, slots.buffers)
    for number in range(num_sources):
        arena = WeightArena(plan, device, source=number)
        pack_weights(Source(number, num_sources, weights, specs), arena)
        for index in range(len(plan.sources[number].buckets)):
            slot = slots.slot(number, index)
            slot.copy_(arena.bucket(number, index))
            await asyncio.to_thread(place_bucket, number, index, slot)
