"""What a mode is: a sender in each source, a receiver in each rollout."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from services.weightsync.arena import WeightArena
from services.weightsync.endpoints import WeightSource, on_device
from services.weightsync.group import WeightGroup
from services.weightsync.plan import WeightPlan
from services.weightsync.transfer import TransferOrder, Transferred


class Sender(Protocol):
    """A source's side."""

    plan: WeightPlan
    held_version: int
    """Version that this source sent last and still holds; -1 for none."""

    def pack(self, source: WeightSource, version: int) -> None:
        """Copy the current weights, unless that version was packed before; then they may change again."""

    def send(self, group: WeightGroup, order: TransferOrder) -> Transferred:
        """Send what was packed. Blocks until all receivers have it."""


class Receiver(Protocol):
    """A rollout's side. The live weights are whole at all times, or nothing is served."""

    plan: WeightPlan
    held_version: int
    """Version that this receiver has beside the live weights, bit by bit; -1 for none."""

    async def prepare(self) -> None:
        """Get ready to receive."""

    def receive(self, group: WeightGroup, order: TransferOrder) -> Transferred:
        """Receive and verify. Blocks."""

    async def adopt(self, version: int) -> float:
        """Put what was received into service; returns the seconds without a token."""

    async def give_up(self) -> None:
        """No transfer comes, or it failed."""


@runtime_checkable
class Lender(Receiver, Protocol):
    """A rollout's side that holds what it received as it came, and can send it on."""

    def send(self, group: WeightGroup, order: TransferOrder) -> Transferred:
        """Send the version that is held. Blocks until all receivers have it."""


@torch.no_grad()
def pack_weights(source: WeightSource, arena: WeightArena) -> None:
    """Copy a source's rows into its arena; returns when the weights may change again.

    Args:
        source: The weights.
        arena: Where they go.

    Raises:
        ValueError: If the source does not hold what the plan says.
    """
    (number,) = arena.buffers
    views = {name: view for name, _, view in arena.pieces(number)}
    with on_device(arena.device):
        for name, tensor in source.weight_tensors():
            if name not in views:
                raise ValueError(f"the trainer holds {name!r}, which the plan does not give it")
            views.pop(name).copy_(tensor, non_blocking=True)
        if views:
            raise ValueError(f"the trainer must hold {sorted(views)[:3]}, according to the plan")
        _settle(arena.device)


def packed_checksums(arena: WeightArena) -> Tensor:
    """Checksums of the buckets of a source's arena, once they are there: ``[num_buckets, 2]`` int64."""
    (number,) = arena.buffers
    with on_device(arena.device):
        checksums = arena.checksums(number)
        _settle(arena.device)
    return checksums


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()
