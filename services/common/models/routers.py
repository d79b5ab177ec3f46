"""Routers of a mixture of experts, and their choices.

All families of transformers have routers that return logits ``[T, E]``, weights ``[T, K]`` and the
numbers of the chosen experts ``[T, K]``, in one call per layer.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def routers_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the routers of a model, layer by layer."""
    for module in model.modules():
        if isinstance(getattr(module, "experts", None), nn.Module):
            router = getattr(module, "gate", None) or getattr(module, "router", None)
            assert isinstance(router, nn.Module), f"{type(module).__name__} has no router"
            yield router


class RouterWatch:
    """Records the choices of a model's routers in each forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._chosen: dict[int, Tensor] = {}
        for place, router in enumerate(routers_of(model)):
            router.register_forward_hook(partial(self._note, place))

    def chosen(self) -> Tensor:
        """Returns the choices of the latest pass: ``[T, layers, K]``."""
        return torch.stack([self._chosen[place] for place in sorted(self._chosen)], 1)

    def _note(
        self, place: int, router: nn.Module, inputs: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        self._chosen[place] = output[2]
