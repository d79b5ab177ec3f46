"""Where weights come from and where they go: the two ends of a transfer inside a member's process."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from services.common.weightsync.arena import WeightArena
from services.common.weightsync.plan import TensorSpec


class WeightSource(Protocol):
    """The weights of one trainer rank."""

    def weight_specs(self) -> Sequence[TensorSpec]:
        """All tensors of the model, in sending order."""

    def weight_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """The current rows that this source holds, by name; cast to the wire's dtype if they differ."""


class WeightSink(Protocol):
    """An engine's weights."""

    async def adopt_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        """Put complete, verified weights into service between two decode steps.

        Returns:
            Seconds in which no token was produced.
        """


@torch.no_grad()
def pack_weights(source: WeightSource, arena: WeightArena) -> Tensor:
    """Copy a source's rows into its arena; returns when the weights may change again.

    Returns:
        Checksums of the arena's buckets.

    Raises:
        ValueError: If the source does not hold what the plan says.
    """
    (number,) = arena.buffers
    current = dict(source.weight_tensors())
    views = {name: view for name, _, view in arena.pieces(number)}
    if views.keys() != current.keys():
        raise ValueError(
            f"the trainer must hold {sorted(views.keys() - current.keys())[:3]} and not "
            f"{sorted(current.keys() - views.keys())[:3]}, according to the plan"
        )
    with on_device(arena.device):
        torch._foreach_copy_(list(views.values()), [current[name] for name in views])
        checksums = arena.checksums(number)
        if arena.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
    return checksums


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Make a device the current one: which one that is, each thread says for itself."""
    if device.type != "cuda":
        return nullcontext()
    context: AbstractContextManager[None] = torch.cuda.device(device)
    return context
