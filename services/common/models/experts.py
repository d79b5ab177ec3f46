"""Experts of a mixture: their names in memory and in checkpoints, and the routers that choose them.

transformers keeps all experts of a layer in ``experts.gate_up_proj`` ``[E, 2 I, H]`` and
``experts.down_proj`` ``[E, H, I]``; checkpoints of most families have separate matrices for every
expert, which are views of the fused tensors. gpt-oss has fused checkpoints as well.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from services.common.models.families import FAMILIES, ExpertParts, Family, is_mixture


def checkpoint_names(
    name: str, value: Tensor, config: Mapping[str, Any], *, first: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Yields a tensor of a model under its checkpoint names.

    Args:
        name: Name in memory, as in transformers.
        first: Number of the first expert in ``value``.

    Yields:
        Names and views.
    """
    names = _parts(config)
    owner, is_expert, leaf = name.partition(".mlp.experts.")
    if names is None:
        yield name, value
    elif not is_expert:
        yield name.replace(".mlp.", f".{names.block}."), value
    else:
        for number, matrix in enumerate(value.unbind(), start=first):
            stem = f"{owner}.{names.block}.experts.{number}"
            if leaf == "down_proj":
                yield f"{stem}.{names.down}.weight", matrix
            else:
                gate, up = matrix.chunk(2)
                yield f"{stem}.{names.gate}.weight", gate
                yield f"{stem}.{names.up}.weight", up


def is_fused(name: str, config: Mapping[str, Any]) -> bool:
    """Returns True if a tensor is divided in the checkpoint, with one name per expert."""
    return _parts(config) is not None and ".mlp.experts." in name


def is_fused_on_hub(config: Mapping[str, Any]) -> bool:
    """Returns True if checkpoints of a mixture also have the experts of a layer in one tensor."""
    return is_mixture(config) and _parts(config) is None


def _parts(config: Mapping[str, Any]) -> ExpertParts | None:
    return FAMILIES.get(str(config.get("model_type")), Family()).expert_parts


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
        for layer, router in enumerate(routers_of(model)):
            router.register_forward_hook(partial(self._note, layer))

    def chosen(self) -> Tensor:
        """Returns the experts chosen in the latest forward pass: ``[T, layers, K]`` indices."""
        return torch.stack([self._chosen[layer] for layer in sorted(self._chosen)], 1)

    def _note(
        self, layer: int, router: nn.Module, inputs: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        self._chosen[layer] = output[2]
