"""``delta``: sends only the words that changed since a version that all members hold, for slow links.

    source      header (number of changed words) | places | words | checksums of all whole buckets
    receiver    writes them into its shadow, which holds the base version, and verifies the buckets

If more than a third of the words changed, or a member does not hold the base, everything is sent.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from services.weightsync.arena import WeightArena, source_digest
from services.weightsync.endpoints import WeightSource
from services.weightsync.group import Channel, WeightGroup
from services.weightsync.modes.base import assigned_rows, packed_checksums
from services.weightsync.modes.shadow import ShadowReceiver, ShadowSender
from services.weightsync.transfer import (
    HEADER_BYTES,
    TransferError,
    Transferred,
    TransferRequest,
    check_buckets,
    check_header,
    make_header,
)
from services.weightsync.weight_plan import WeightPlan

_EVERYTHING = -1
# A changed word of 4 bytes is sent with its position of 4 or 8 bytes, at most three times its size.
_WORTHWHILE = 3
_WORD = torch.int32
_PIECE_WORDS: Final = 1 << 18
_THREADS: Final = max(1, min(4, len(os.sched_getaffinity(0))))
"""Threads that compare weights in host memory; more would compete with training for the memory."""


class DeltaSender(ShadowSender):
    """Sender that knows which words may have changed since the version that it sent last."""

    def send(self, group: WeightGroup, request: TransferRequest) -> Transferred:
        """Sends the changes since ``request.base_version``; everything if that is -1."""
        if request.base_version < 0:
            return super().send(group, request)
        checksums = self._prepared_checksums(request)
        if request.base_version != self.held_version:
            raise TransferError(
                f"expected a request for a delta from version {self.held_version}, got one from "
                f"{request.base_version}"
            )
        transferred = self._send_changes(group, checksums, request)
        self.held_version = request.version
        return transferred

    def _send_changes(
        self, group: WeightGroup, checksums: Tensor, request: TransferRequest
    ) -> Transferred:
        ((source, channel),) = group.channels.items()
        group.bound(self.plan, request.timeout_s)
        now = self._arena.buffers[source].view(_WORD)
        places = self._changed_places(now)
        num_changed = _EVERYTHING if places is None else places.numel()
        header = make_header(self.plan, request, source, num_changed).to(now.device)
        parts = [now] if places is None else [places, now.index_select(0, places)]
        works = [channel.broadcast(header)]
        works += [
            channel.broadcast(piece) for tensor in parts for piece in _pieces(tensor, self.plan)
        ]
        works.append(channel.broadcast(checksums))
        for work in works:
            work.wait()
        group.synchronize()
        return Transferred(
            digests=(source_digest(self.plan.plan_hash, request.version, source, checksums),),
            num_bytes=sum(tensor.nbytes for tensor in parts),
        )

    def _changed_places(self, words: Tensor) -> Tensor | None:
        """Returns positions of words, all that changed among them; None if everything is to be sent.

        Args:
            words: ``[n]`` int32, the arena.
        """
        raise NotImplementedError


class DeviceDeltaSender(DeltaSender):
    """Sender on a GPU: it keeps the last sent version, and compares both when it sends."""

    def __init__(self, plan: WeightPlan, device: torch.device, source: int) -> None:
        super().__init__(plan, device, source)
        self._sent = WeightArena(plan, device, source=source)

    def pack(self, source: WeightSource, version: int) -> None:
        """Copies the current weights; keeps the last sent version beside them."""
        if version != self._packed_version and self.held_version == self._packed_version:
            self._arena, self._sent = self._sent, self._arena
        super().pack(source, version)

    def _changed_places(self, words: Tensor) -> Tensor | None:
        (sent_values,) = self._sent.buffers.values()
        places = (words != sent_values.view(_WORD)).nonzero().flatten()
        return places.to(_place_dtype(words)) if places.numel() < _most_changes(words) else None


class HostDeltaSender(DeltaSender):
    """Sender in host memory: it compares each tensor while it copies it, and keeps no other version."""

    def __init__(self, plan: WeightPlan, device: torch.device, source: int) -> None:
        super().__init__(plan, device, source)
        self._places: Tensor | None = None
        """Positions of the words that may differ from the last sent version, ascending; None for all."""

    def pack(self, source: WeightSource, version: int) -> None:
        """Copies what changed in the current weights."""
        packed_version, places = self._packed_version, self._places
        if version == packed_version:
            return
        self._places = None
        if packed_version >= 0:
            # A failure half-way leaves an arena of no version.
            self._packed_version = -1
            new_places = update_arena(source, self._arena)
            self._checksums = packed_checksums(self._arena)
            self._packed_version = version
            if self.held_version == packed_version:
                self._places = new_places
            elif new_places is not None and places is not None:
                self._places = torch.cat((places, new_places)).unique()
        else:
            super().pack(source, version)

    def _changed_places(self, words: Tensor) -> Tensor | None:
        places = self._places
        return None if places is None or places.numel() >= _most_changes(words) else places


def delta_sender(plan: WeightPlan, device: torch.device, source: int) -> DeltaSender:
    """Returns the sender for a device."""
    sender = HostDeltaSender if device.type == "cpu" else DeviceDeltaSender
    return sender(plan, device, source)


class DeltaReceiver(ShadowReceiver):
    """Receiver that applies changes to the version in its shadow."""

    def _receive(
        self, group: WeightGroup, shadow: WeightArena, request: TransferRequest
    ) -> Transferred:
        if request.base_version < 0:
            return super()._receive(group, shadow, request)
        return self._receive_changes(group, shadow, request)

    def _receive_changes(
        self, group: WeightGroup, shadow: WeightArena, request: TransferRequest
    ) -> Transferred:
        group.bound(self.plan, request.timeout_s)
        digests: list[str] = []
        num_bytes = 0
        for source, channel in sorted(group.channels.items()):
            num_bytes += self._apply(source, channel, shadow, request)
            count = len(self.plan.sources[source].buckets)
            stated = torch.zeros(count, 2, dtype=torch.int64, device=shadow.device)
            channel.broadcast(stated).wait()
            group.synchronize()
            computed = shadow.checksums(source)
            digests.append(check_buckets(computed, stated, self.plan, request, source=source))
        return Transferred(digests=tuple(digests), num_bytes=num_bytes)

    def _apply(
        self, source: int, channel: Channel, shadow: WeightArena, request: TransferRequest
    ) -> int:
        """Receives one source's changes into the shadow; returns their bytes."""
        device = shadow.device
        header = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device=device)
        channel.broadcast(header).wait()
        num_changed = check_header(header, self.plan, request, source)
        words = shadow.buffers[source].view(_WORD)
        if num_changed == _EVERYTHING:
            self._fill(channel, words)
            return words.nbytes
        places = torch.zeros(num_changed, dtype=_place_dtype(words), device=device)
        values = torch.zeros(num_changed, dtype=_WORD, device=device)
        self._fill(channel, places, values)
        if num_changed:
            lowest, highest = places.aminmax()
            if lowest < 0 or highest >= words.numel():
                raise TransferError(
                    f"version {request.version} is rejected: source {source} changes positions outside of "
                    "its weights"
                )
            words.index_copy_(0, places.long(), values)
        return places.nbytes + values.nbytes

    def _fill(self, channel: Channel, *parts: Tensor) -> None:
        pieces = [piece for tensor in parts for piece in _pieces(tensor, self.plan)]
        for work in [channel.broadcast(piece) for piece in pieces]:
            work.wait()


@torch.no_grad()
def update_arena(source: WeightSource, arena: WeightArena) -> Tensor | None:
    """Copies the words of a source's rows that changed into its arena, in host memory.

    Words are compared in pieces that stay in the processor's cache, by several threads and NumPy, whose
    search for the changed ones is faster than torch's.

    Returns:
        Positions of the changed words, ascending; None if they are so many that everything is sent.

    Raises:
        ValueError: If the source's tensors differ from the plan's.
    """
    (buffer,) = arena.buffers.values()
    words, dtype = buffer.view(_WORD), _place_dtype(buffer.view(_WORD))
    changed_places: dict[int, Tensor] = {}
    num_left = _most_changes(words)
    with ThreadPoolExecutor(_THREADS, "compare-weights") as pool:
        for tensor, view in assigned_rows(source, arena):
            start = (view.data_ptr() - buffer.data_ptr()) // _WORD.itemsize
            if num_left <= 0:
                view.copy_(tensor)
                continue
            copied = pool.map(
                partial(_copy_changes, words.numpy(), start), *_as_pieces(tensor, view)
            )
            places = torch.from_numpy(np.concatenate([*copied]))
            changed_places[start] = places.to(dtype)
            num_left -= places.numel()
    if num_left <= 0:
        return None
    return torch.cat(
        [changed_places[start] for start in sorted(changed_places)] or [words[:0].to(dtype)]
    )


def _as_pieces(tensor: Tensor, view: Tensor) -> tuple[list[np.ndarray], range]:
    """Returns the words of a tensor in pieces, in the dtype of its view, and the first word of each piece."""
    flat = tensor.detach().to(view.dtype).reshape(-1).view(torch.uint8)
    if num_padded := -flat.numel() % _WORD.itemsize:
        flat = torch.cat((flat, flat.new_zeros(num_padded)))  # the padding of the arena
    new = np.frombuffer(flat.numpy().data, np.int32)
    starts = range(0, max(len(new), 1), _PIECE_WORDS)
    return [new[start : start + _PIECE_WORDS] for start in starts], starts


def _copy_changes(words: np.ndarray, first: int, new: np.ndarray, start: int) -> np.ndarray:
    """Copies the words of a piece that differ into the arena; returns their positions there."""
    old = words[first + start : first + start + len(new)]
    places = np.flatnonzero(old != new)
    if len(places) * _WORTHWHILE < len(new):
        old[places] = new[places]
    else:
        old[:] = new
    return places + (first + start)


def _most_changes(words: Tensor) -> int:
    """Returns the number of changed words from which on everything is sent."""
    return -(-words.numel() // _WORTHWHILE)


def _place_dtype(words: Tensor) -> torch.dtype:
    """Returns the dtype of positions: 4 bytes if all positions of a source fit."""
    return torch.int32 if words.numel() <= torch.iinfo(torch.int32).max else torch.int64


def _pieces(tensor: Tensor, plan: WeightPlan) -> tuple[Tensor, ...]:
    """Splits a tensor into pieces for one collective each, at most as large as a bucket; none if empty."""
    first = plan.sources[0].buckets[0]
    step = (first.stop - first.start) // tensor.element_size()
    return tensor.split(step) if tensor.numel() else ()
