"""Sends a version through two slots; see ``services/weightsync/modes/staged.py``."""

import torch

from services.common.runspec.weight_modes import STAGING_SLOTS
from services.weightsync.arena import WeightArena, source_digest
from services.weightsync.checksum import write_checksum
from services.weightsync.group import WeightGroup, Work
from services.weightsync.modes.staged import Slots
from services.weightsync.transfer import TransferOrder, Transferred, make_statement


def send_staged(
    group: WeightGroup, arena: WeightArena, slots: Slots, order: TransferOrder
) -> Transferred:
    """Sends an arena through the slots; see :func:`services.weightsync.transfer.send_version`."""
    ((source, channel),) = group.channels.items()
    plan = arena.plan
    group.bound(plan, order.timeout_s)
    works: list[Work] = []
    count = len(plan.sources[source].buckets)
    stated = torch.zeros(count, 2, dtype=torch.int64, device=slots.device)
    for index in range(count):
        if index >= STAGING_SLOTS:
            works[index - STAGING_SLOTS].wait()
        slot = slots.slot(source, index)
        slot.copy_(arena.bucket(source, index))
        write_checksum(slot, stated[index])
        works.append(channel.broadcast(slot))
    works.append(channel.broadcast(make_statement(plan, order, source, stated)))
    for work in works:
        work.wait()
    group.synchronize()
    return Transferred(
        digests=(source_digest(plan.plan_hash, order.version, source, stated),),
        num_bytes=plan.sources[source].arena_bytes,
    )
