"""Sends a version through two slots; see ``services/weightsync/modes/staged.py``."""

from collections.abc import Callable

import torch

from services.common.runspec.weight_modes import STAGING_SLOTS
from services.weightsync.arena import WeightArena, source_digest
from services.weightsync.checksum import write_checksum
from services.weightsync.endpoints import WeightSource
from services.weightsync.group import WeightGroup, Work
from services.weightsync.modes.base import pack_weights
from services.weightsync.modes.staged import Slots
from services.weightsync.transfer import Transferred, TransferRequest, make_statement
from services.weightsync.weight_plan import WeightPlan


class StagedSender:
    """Sends its arena, bucket by bucket, through two slots in other memory.

    Args:
        arena: Returns the copy of the weights, which waits for its transfer.
    """

    def __init__(self, plan: WeightPlan, slots: Slots, arena: Callable[[], WeightArena]) -> None:
        self.plan = plan
        self.held_version = -1
        self._packed_version = -1
        self._slots = slots
        self._arena = arena

    def pack(self, source: WeightSource, version: int) -> None:
        if version != self._packed_version:
            self._packed_version = -1
            self._copy(source)
            self._packed_version = version

    def _copy(self, source: WeightSource) -> None:
        pack_weights(source, self._arena())

    def send(self, group: WeightGroup, request: TransferRequest) -> Transferred:
        """Sends the arena; see :func:`services.weightsync.transfer.send_version`."""
        ((source, channel),) = group.channels.items()
        group.bound(self.plan, request.timeout_s)
        arena, works = self._arena(), list[Work]()
        count = len(self.plan.sources[source].buckets)
        stated = torch.zeros(count, 2, dtype=torch.int64, device=self._slots.device)
        for index in range(count):
            if index >= STAGING_SLOTS:
                works[index - STAGING_SLOTS].wait()
            slot = self._slots.slot(source, index)
            slot.copy_(arena.bucket(source, index))
            write_checksum(slot, stated[index])
            works.append(channel.broadcast(slot))
        works.append(channel.broadcast(make_statement(self.plan, request, source, stated)))
        for work in works:
            work.wait()
        group.synchronize()
        return Transferred(
            digests=(source_digest(self.plan.plan_hash, request.version, source, stated),),
            num_bytes=self.plan.sources[source].arena_bytes,
        )
