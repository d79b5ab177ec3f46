"""Transfers through two small buffers per source, so that the wire needs no second copy of the weights.

source      copy bucket i+1 into a slot          receiver   copy bucket i-1 out of its slot
while bucket i is on the wire                   while bucket i is on the wire

Sources are in ``services/extras/weight_modes/sending.py``.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from services.common.runspec.weight_modes import STAGING_SLOTS
from services.weightsync.checksum import write_checksum
from services.weightsync.endpoints import Place
from services.weightsync.group import Channel, WeightGroup, Work
from services.weightsync.transfer import (
    Transferred,
    TransferRequest,
    check_statement,
    no_statement,
)
from services.weightsync.weight_plan import WeightPlan

_ALIGNMENT: Final = 256


class Slots:
    """Buffers of a bucket's size, which the buckets of a source use in rotation.

    Args:
        count: Number of buffers of each source; no source gets more than it has buckets, but at least
            ``STAGING_SLOTS``.

    Attributes:
        buffers: ``[n]`` uint8, by source and the index of the bucket modulo the number of buffers.
    """

    def __init__(
        self,
        plan: WeightPlan,
        device: torch.device,
        *,
        pinned: bool = False,
        count: int = STAGING_SLOTS,
    ) -> None:
        self.plan = plan
        self.device = device
        self._pinned = pinned
        self._count = count
        self.buffers = [
            _buffers(
                max(bucket.stop - bucket.start for bucket in source.buckets),
                max(STAGING_SLOTS, min(count, len(source.buckets))),
                device=device,
                pinned=pinned,
            )
            for source in plan.sources
        ]

    def renewed(self) -> "Slots":
        """Returns new buffers: an aborted collective may still write into the old ones."""
        return Slots(self.plan, self.device, pinned=self._pinned, count=self._count)

    def slot(self, source: int, index: int) -> Tensor:
        """Returns the slot of a source's bucket during its transfer."""
        bucket = self.plan.sources[source].buckets[index]
        buffers = self.buffers[source]
        return buffers[index % len(buffers)][: bucket.stop - bucket.start]


def _buffers(num_bytes: int, count: int, *, device: torch.device, pinned: bool) -> Sequence[Tensor]:
    """Returns buffers in one block of memory, which other processes open as one."""
    stride = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    block = torch.zeros(count * stride, dtype=torch.uint8, device=device, pin_memory=pinned)
    return [buffer[:num_bytes] for buffer in block.split(stride)]


def receive_staged(
    group: WeightGroup, slots: Slots, request: TransferRequest, copy_slot: Place
) -> Transferred:
    """Receives through the slots and verifies; see :func:`services.weightsync.transfer.receive_version`.

    A bucket is placed before its checksum can be compared, as the source sends the checksums last.
    If this raises, the target must not be used.
    """
    group.bound(slots.plan, request.timeout_s)
    arriving = [
        _Arriving(source, channel, slots, copy_slot)
        for source, channel in sorted(group.channels.items())
    ]
    for index in range(max(len(source.buckets) for source in slots.plan.sources)):
        for peer in arriving:
            peer.place_bucket(index)
    for peer in arriving:
        peer.finish()
    group.synchronize()
    return Transferred(
        digests=tuple(peer.verified(request) for peer in arriving), num_bytes=slots.plan.num_bytes
    )


class _Arriving:
    """Receives and verifies the buckets of one source."""

    def __init__(self, source: int, channel: Channel, slots: Slots, copy_slot: Place) -> None:
        self._source = source
        self._channel = channel
        self._slots = slots
        self._copy_slot = copy_slot
        self._num_buckets = len(slots.plan.sources[source].buckets)
        self._computed = torch.zeros(self._num_buckets, 2, dtype=torch.int64, device=slots.device)
        self._stated = no_statement(self._computed)
        self._works: list[Work] = []
        for index in range(STAGING_SLOTS):
            self._start(index)

    def place_bucket(self, index: int) -> None:
        """Places a bucket and starts to receive a later one into its slot."""
        if index >= self._num_buckets:
            return
        self._works[index].wait()
        slot = self._slots.slot(self._source, index)
        write_checksum(slot, self._computed[index])
        self._copy_slot(self._source, index, slot)
        self._start(index + STAGING_SLOTS)

    def finish(self) -> None:
        """Receives the source's statement."""
        self._channel.broadcast(self._stated).wait()

    def verified(self, request: TransferRequest) -> str:
        """Compares the statement with the received bytes; returns their digest."""
        plan = self._slots.plan
        stated, computed = self._stated.cpu(), self._computed.cpu()
        return check_statement(stated, computed, plan, request, source=self._source)

    def _start(self, index: int) -> None:
        if index < self._num_buckets:
            slot = self._slots.slot(self._source, index)
            self._works.append(self._channel.broadcast(slot))
