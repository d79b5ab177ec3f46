"""``delta``: sends only the words that changed since a version that all members hold, for slow links.

    source      header (number of changed words) | places | words | checksums of all whole buckets
    receiver    writes them into its shadow, which holds the base version, and verifies the buckets

If more than a third of the words changed, or a member does not hold the base, everything is sent.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Final

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
# A changed word of 4 bytes is sent with its position of 4 or 8 bytes, at most three times its size.
_WORTHWHILE = 3
_WORD = torch.int32
_PIECE_WORDS: Final = 1 << 18
_THREADS: Final = max(1, min(4, len(os.sched_getaffinity(0))))
"""Threads that compare weights in host memory; more would compete with training for the memory."""


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
        places = changed_places(now, self._sent.buffers[source].view(_WORD)).to(_place_dtype(now))
        is_worthwhile = places.numel() * _WORTHWHILE < now.numel()
        num_changed = places.numel() if is_worthwhile else _EVERYTHING
        header = make_header(self.plan, order, source, num_changed).to(now.device)
        parts = [places, now.index_select(0, places)] if is_worthwhile else [now]
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
        places = torch.zeros(num_changed, dtype=_place_dtype(words), device=device)
        changed = torch.zeros(num_changed, dtype=_WORD, device=device)
        self._fill(channel, places, changed)
        if num_changed:
            lowest, highest = places.aminmax()
            if lowest < 0 or highest >= words.numel():
                raise TransferError(
                    f"version {order.version} is rejected: source {source} changes positions outside of "
                    "its weights"
                )
            words.index_copy_(0, places.long(), changed)
        return places.nbytes + changed.nbytes

    def _fill(self, channel: Channel, *parts: Tensor) -> None:
        pieces = [piece for part in parts for piece in _pieces(part, self.plan)]
        for work in [channel.broadcast(piece) for piece in pieces]:
            work.wait()


def changed_places(now: Tensor, before: Tensor) -> Tensor:
    """Returns the positions of the words that differ, ascending: ``[num_changed]`` int64.

    In host memory the words are compared in pieces that stay in the processor's cache, by several threads and
    NumPy, whose search for the changed ones is faster than torch's.

    Args:
        now: ``[n]`` int32.
        before: ``[n]`` int32.
    """
    if now.is_cuda:
        return (now != before).nonzero().flatten()
    words, old_words = now.numpy(), before.numpy()

    def places_of(start: int) -> np.ndarray:
        stop = start + _PIECE_WORDS
        return np.flatnonzero(words[start:stop] != old_words[start:stop]) + start

    with ThreadPoolExecutor(_THREADS, "compare-weights") as pool:
        places = [*pool.map(places_of, range(0, max(len(words), 1), _PIECE_WORDS))]
    return torch.from_numpy(np.concatenate(places))


def _place_dtype(words: Tensor) -> torch.dtype:
    """Returns the dtype of positions: 4 bytes if all positions of a source fit."""
    return torch.int32 if words.numel() <= torch.iinfo(torch.int32).max else torch.int64


def _pieces(part: Tensor, plan: WeightPlan) -> tuple[Tensor, ...]:
    """Splits a tensor into pieces for one collective each, at most as large as a bucket; none if empty."""
    first = plan.sources[0].buckets[0]
    step = (first.stop - first.start) // part.element_size()
    return part.split(step) if part.numel() else ()
