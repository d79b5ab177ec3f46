"""Shape and dtype of the experts that the routers of a mixture choose for each token; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.models.families import FAMILIES, Family, num_experts

_MAX_UINT8 = 255


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """Layers and experts of a mixture of experts."""

    layers: tuple[int, ...]
    """Numbers of the layers that have experts."""
    num_chosen: int
    """Number of experts per token in each of them."""
    num_experts: int
    """Number of experts per layer."""

    @property
    def dtype(self) -> str:
        """Smallest dtype for all experts and ``missing``."""
        return "uint8" if self.num_experts <= _MAX_UINT8 else "int16"

    @property
    def missing(self) -> int:
        """Marks an unknown choice: the highest value of the dtype, which is no expert."""
        return _MAX_UINT8 if self.dtype == "uint8" else 2**15 - 1

    @property
    def tail(self) -> tuple[int, int]:
        """Shape of one token's entry."""
        return len(self.layers), self.num_chosen


def routing_shape(config: Mapping[str, Any]) -> RoutingShape | None:
    """Returns the routing shape of a model; None if it has no routers.

    Args:
        config: A model's configuration, including defaults.
    """
    if FAMILIES.get(str(config.get("model_type")), Family()).routing is None:
        return None
    dense = set(config.get("mlp_only_layers") or ()) | set(
        range(config.get("first_k_dense_replace") or 0)
    )
    every = config.get("decoder_sparse_step") or 1
    return RoutingShape(
        layers=tuple(
            layer
            for layer in range(config["num_hidden_layers"])
            if layer not in dense and (layer + 1) % every == 0
        ),
        num_chosen=int(config["num_experts_per_tok"]),
        num_experts=num_experts(config),
    )
