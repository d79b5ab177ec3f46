"""Interfaces of a transfer mode: a sender in each source, a receiver in each rollout."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from services.weightsync.arena import WeightArena
from services.weightsync.endpoints import WeightSource, on_device
from services.weightsync.group import WeightGroup
from services.weightsync.transfer import Transferred, TransferRequest
from services.weightsync.weight_plan import WeightPlan


class Sender(Protocol):
    """Sending side of a mode."""

    plan: WeightPlan
    held_version: int
    """Version that this source sent last and still holds; -1 for none."""

    def pack(self, source: WeightSource, version: int) -> None:
        """Copies the current weights, unless that version is already packed; then they may change again."""

    def send(self, group: WeightGroup, request: TransferRequest) -> Transferred:
        """Sends the packed weights. Blocks until all receivers have them."""


class Receiver(Protocol):
    """Receiving side of a mode. The live weights are always complete, or nothing is served."""

    plan: WeightPlan
    held_version: int
    """Version whose bytes this receiver has in addition to the live weights; -1 for none."""

    async def prepare(self) -> None:
        """Prepares to receive."""

    def receive(self, group: WeightGroup, request: TransferRequest) -> Transferred:
        """Receives and verifies a version. Blocks."""

    async def adopt(self, version: int) -> float:
        """Puts the received version into service; returns the seconds without a token."""

    async def give_up(self) -> None:
        """Cleans up after a failed or cancelled transfer."""


@runtime_checkable
class PeerSender(Receiver, Protocol):
    """Receiver that keeps the received bytes and can send them to joining rollouts."""

    def send(self, group: WeightGroup, request: TransferRequest) -> Transferred:
        """Sends the held version. Blocks until all receivers have it."""


@torch.no_grad()
def pack_weights(source: WeightSource, arena: WeightArena) -> None:
    """Copies a source's rows into its arena; returns when the weights may change again.

    Raises:
        ValueError: If the source's tensors differ from the plan's.
    """
    with on_device(arena.device):
        for tensor, view in assigned_rows(source, arena):
            view.copy_(tensor, non_blocking=True)
        _settle(arena.device)


def assigned_rows(source: WeightSource, arena: WeightArena) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields each tensor's rows of a source, and their place in its arena; raises as :func:`pack_weights`."""
    views = {name: view for number in arena.buffers for name, _, view in arena.pieces(number)}
    for name, tensor in source.weight_tensors():
        if name not in views:
            raise ValueError(f"the trainer has {name!r}, which the plan does not assign to it")
        yield tensor, views.pop(name)
    if views:
        raise ValueError(f"the trainer lacks {sorted(views)[:3]}, which the plan assigns to it")


def packed_checksums(arena: WeightArena) -> Tensor:
    """Returns the checksums of a source's arena after they are computed: ``[num_buckets, 2]`` int64."""
    (number,) = arena.buffers
    with on_device(arena.device):
        checksums = arena.checksums(number)
        _settle(arena.device)
    return checksums


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()
