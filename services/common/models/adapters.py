"""Weights of a model that get a LoRA adapter, by their names and shapes."""

from collections.abc import Mapping
from math import prod
from typing import Final

from services.common.models.vision import TOWER
from services.common.runspec.trainer import OF_EXPERTS, LoraSpec

WITHOUT_ADAPTERS: Final = (".mamba.out_proj", ".conv1d")
"""Suffixes of names of modules whose weights kernels read directly; they would ignore an adapter."""
# Routers choose and weight experts. In most families they are not linear modules.
_ROUTERS: Final = (".gate", ".router", ".shared_expert_gate")


def target_modules(shapes: Mapping[str, tuple[int, ...]], lora: LoraSpec) -> tuple[str, ...]:
    """Returns ``trainer.lora.target_modules``; for null, the linear modules of the decoder's layers, sorted.

    Args:
        shapes: Shapes of the model's weights by name.
    """
    if lora.target_modules is not None:
        return lora.target_modules
    return tuple(sorted({name.rpartition(".")[2] for name in _linear_modules(shapes)}))


def unknown_modules(shapes: Mapping[str, tuple[int, ...]], lora: LoraSpec) -> list[str]:
    """Returns the target modules that are neither linear modules of the decoder's layers nor experts.

    Output and input embeddings are none: the loss and the engines use their weights directly.
    """
    modules = [*_linear_modules(shapes), *(name for name in shapes if f".{OF_EXPERTS}" in name)]
    return [
        target
        for target in target_modules(shapes, lora)
        if not any(f".{name}".endswith(f".{target}") for name in modules)
    ]


def _linear_modules(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    modules = [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if len(shape) == 2 and ".layers." in name and name.endswith(".weight")
    ]
    return [name for name in modules if not name.endswith(_ROUTERS + WITHOUT_ADAPTERS)]


def adapted_weights(
    shapes: Mapping[str, tuple[int, ...]], lora: LoraSpec
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the weights that get an adapter; those of experts have three dimensions.

    The weights of a vision tower get no adapter.
    """
    targets = target_modules(shapes, lora)
    ends = tuple(f".{base}" if OF_EXPERTS in base else f".{base}.weight" for base in targets)
    return {
        name: shape
        for name, shape in shapes.items()
        if f".{name}".endswith(ends)
        and not name.startswith(TOWER)
        and (len(shape) == 2 or f".{OF_EXPERTS}" in name)
    }


def adapter_weights(shapes: Mapping[str, tuple[int, ...]], lora: LoraSpec) -> float:
    """Returns the number of parameters in the adapters of a model with weights of these shapes."""
    adapted = adapted_weights(shapes, lora).values()
    return float(lora.rank * sum(prod(shape[:-2]) * sum(shape[-2:]) for shape in adapted))
