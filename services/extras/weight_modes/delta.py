"""``delta``: sends only the words that changed since a version that all members hold, for slow links.

    source      header (number of changed words) | places | words | checksums of all whole buckets
    receiver    writes them into its shadow, which holds the base version, and verifies the buckets

If more than a third of the words changed, or a member does not hold the base, everything is sent.
"""

import numpy as np
import torch
from torch import Tensor

from services.weightsync.arena import WeightArena, source_digest
from services.weightsync.endpoints import WeightSource
from services.weightsync.group import Channel, WeightGroup
from services.weightsync.modes.shadow import ShadowReceiver, ShadowSender
from services.weightsync.plan import WeightPlan
from services.weightsync.transfer import (
    HEADER_BYTES,
    TransferError,
    TransferOrder,
    Transferred,
    check_buckets,
    check_header,
    make_header,
)

_EVERYTHING = -1
# A changed word of 4 bytes is sent with its position of 8 bytes, in total three times its size.
_WORTHWHILE = 3
_WORD, _PLACE = torch.int32, torch.int64
_PIECE_WORDS = 1 << 18


class DeltaSender(ShadowSender):
    """Sender that keeps the last sent version to find the changes."""

    def __init__(self, plan: WeightPlan, device: torch.device, source: int) -> None:
        super().__init__(plan, device, source)
        self._sent = WeightArena(plan, device, source=source)

    def pack(self, source: WeightSource, version: int) -> None:
        """Copies the current weights; keeps the last sent version beside them."""
        if version != self._packed_version and self.held_version == self._packed_version:
            self._arena, self._sent = self._sent, self._arena
        super().pack(source, version)

    def send(self, group: WeightGroup, order: TransferOrder) -> Transferred:
        """Sends the changes since ``order.base_version``; everything if that is -1."""
        if order.base_version < 0:
            return super().send(group, order)
        checksums = self._prepared_checksums(order)
        if order.base_version != self.held_version:
            raise TransferError(
                f"expected a request for a delta from version {self.held_version}, got one from "
                f"{order.base_version}"
            )
        done = self._send_changes(group, checksums, order)
        self.held_version = order.version
        return done

    def _send_changes(
        self, group: WeightGroup, checksums: Tensor, order: TransferOrder
    ) -> Transferred:
        ((source, channel),) = group.channels.items()
        group.bound(self.plan, order.timeout_s)
        now = self._arena.buffers[source].view(_WORD)
        places = changed_places(now, self._sent.buffers[source].view(_WORD))
        is_worthwhile = places.numel() * _WORTHWHILE < now.numel()
        num_changed = places.numel() if is_worthwhile else _EVERYTHING
        header = make_header(self.plan, order, source, num_changed).to(now.device)
        parts = [places, now[places]] if is_worthwhile else [now]
        works = [channel.broadcast(header)]
        works += [channel.broadcast(piece) for part in parts for piece in _pieces(part, self.plan)]
        works.append(channel.broadcast(checksums))
        for work in works:
            work.wait()
        group.synchronize()
        return Transferred(
            digests=(source_digest(self.plan.plan_hash, order.version, source, checksums),),
            num_bytes=sum(part.nbytes for part in parts),
        )


class DeltaReceiver(ShadowReceiver):
    """Receiver that applies changes to the version in its shadow."""

    def _receive(
        self, group: WeightGroup, shadow: WeightArena, order: TransferOrder
    ) -> Transferred:
        if order.base_version < 0:
            return super()._receive(group, shadow, order)
        return self._receive_changes(group, shadow, order)

    def _receive_changes(
        self, group: WeightGroup, shadow: WeightArena, order: TransferOrder
    ) -> Transferred:
        group.bound(self.plan, order.timeout_s)
        digests: list[str] = []
        num_bytes = 0
        for source, channel in sorted(group.channels.items()):
            num_bytes += self._apply(source, channel, shadow, order)
            count = len(self.plan.sources[source].buckets)
            stated = torch.zeros(count, 2, dtype=torch.int64, device=shadow.device)
            channel.broadcast(stated).wait()
            group.synchronize()
            computed = shadow.checksums(source)
            digests.append(check_buckets(computed, stated, self.plan, order, source=source))
        return Transferred(digests=tuple(digests), num_bytes=num_bytes)

    def _apply(
        self, source: int, channel: Channel, shadow: WeightArena, order: TransferOrder
    ) -> int:
        """Receives one source's changes into the shadow; returns their bytes."""
        device = shadow.device
        header = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device=device)
        channel.broadcast(header).wait()
        num_changed = check_header(header, self.plan, order, source)
        words = shadow.buffers[source].view(_WORD)
        if num_changed == _EVERYTHING:
            self._fill(channel, words)
            return words.nbytes
        places = torch.zeros(num_changed, dtype=_PLACE, device=device)
        changed = torch.zeros(num_changed, dtype=_WORD, device=device)
        self._fill(channel, places)
        self._fill(channel, changed)
        if ((places < 0) | (places >= words.numel())).any():
            raise TransferError(
                f"version {order.version} is rejected: source {source} changes positions outside of "
                "its weights"
            )
        words[places] = changed
        return places.nbytes + changed.nbytes

    def _fill(self, channel: Channel, part: Tensor) -> None:
        for work in [channel.broadcast(piece) for piece in _pieces(part, self.plan)]:
            work.wait()


def changed_places(now: Tensor, before: Tensor) -> Tensor:
    """Returns the positions of the words that differ, ascending: ``[num_changed]`` int64.

    In host memory the words are compared in pieces that stay in the processor's cache, by NumPy, whose search
    for the changed ones is faster than torch's.

    Args:
        now: ``[n]`` int32.
        before: ``[n]`` int32.
    """
    if now.is_cuda:
        return (now != before).nonzero().flatten()
    pairs = zip(now.split(_PIECE_WORDS), before.split(_PIECE_WORDS), strict=True)
    places = [
        np.flatnonzero(one.numpy() != other.numpy()) + number * _PIECE_WORDS
        for number, (one, other) in enumerate(pairs)
    ]
    return torch.from_numpy(np.concatenate(places))


def _pieces(part: Tensor, plan: WeightPlan) -> tuple[Tensor, ...]:
    """Splits a tensor into pieces for one collective each, at most as large as a bucket; none if empty."""
    first = plan.sources[0].buckets[0]
    step = (first.stop - first.start) // part.element_size()
    return part.split(step) if part.numel() else ()
