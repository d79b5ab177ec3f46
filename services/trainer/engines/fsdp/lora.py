"""LoRA adapters: added to a model, and merged when the weights leave the trainer.

peft adapts linear modules. The experts of a layer are fused tensors: there an adapter is two more tensors
for each, which :mod:`~services.trainer.model.experts` adds to its product.
"""

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from services.common.models.adapters import WITHOUT_ADAPTERS, target_modules, unknown_modules
from services.common.models.loading import stored_tensors
from services.common.models.vision import TOWER, vision_tower
from services.common.runspec.trainer import OF_EXPERTS, LoraSpec
from services.trainer.collectives import local_part
from services.trainer.model.experts import expert_adapter
from services.trainer.model.quantized import QuantizedLinear, quantized_layers
from services.weightsync.adapters import merged_weight
from services.weightsync.weight_plan import LORA_DOWN, LORA_UP

_BASE = ".base_layer."
_ADAPTER = ".lora_"


def add_adapters(model: PreTrainedModel, spec: LoraSpec) -> None:
    """Adds an adapter to each target module and freezes everything else, in place.

    :func:`begin_adapters` then sets the adapters' initial values.

    Raises:
        ValueError: If the model lacks a target module, or peft cannot adapt one.
    """
    modules, fused = dict(model.named_modules()), _fused(model)
    shapes = {name: tuple(value.shape) for name, value in stored_tensors(model).items()}
    targets = target_modules(shapes, spec)
    linear_targets = [target for target in targets if OF_EXPERTS not in target]
    if ignored := [
        target
        for target in linear_targets
        if any(name.endswith(WITHOUT_ADAPTERS) for name in _named(target, modules))
    ]:
        raise ValueError(
            f"trainer.lora.target_modules has {', '.join(ignored)}, but kernels would ignore adapters of "
            "these modules of model.path; remove them"
        )
    if unknown := unknown_modules(shapes, spec):
        experts = sorted({OF_EXPERTS + name.rpartition(".")[2] for name in fused})
        choices = [*target_modules(shapes, LoraSpec()), *experts]
        raise ValueError(
            f"trainer.lora.target_modules has {', '.join(unknown)}, but modules of model.path that can have "
            f"an adapter are {', '.join(choices)}; name some of these"
        )
    for target in targets:
        for name in _named(target, fused) if OF_EXPERTS in target else ():
            owner, _, leaf = name.rpartition(".")
            _adapt_experts(modules[owner], leaf, spec)
    if linear_targets:
        _adapt_modules(model, linear_targets, spec)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_ADAPTER in name)
        if parameter.requires_grad:
            # peft creates adapters in the dtype of the weight.
            parameter.data = parameter.data.float()


def _fused(model: nn.Module) -> dict[str, Tensor]:
    """Returns the fused matrices of experts, by name."""
    parameters = model.named_parameters()
    return {name: leaf for name, leaf in parameters if OF_EXPERTS in name and leaf.ndim == 3}


def _named(target: str, modules: Iterable[str]) -> list[str]:
    return [name for name in modules if f".{name}".endswith(f".{target}")]


def _adapt_experts(experts: Any, leaf: str, spec: LoraSpec) -> None:
    """Adds an adapter to a fused tensor of a layer's experts: ``[E, r, in]`` and ``[E, out, r]``."""
    weight = getattr(experts, leaf)
    num_experts, *sides = weight.shape
    num_in, num_out = sides if experts.is_transposed else reversed(sides)
    down, up = (num_experts, spec.rank, num_in), (num_experts, num_out, spec.rank)
    for name, shape in zip(expert_adapter(leaf), (down, up), strict=True):
        zeros = torch.zeros(shape, dtype=torch.float32, device=weight.device)
        experts.register_parameter(name, nn.Parameter(zeros))
    experts.lora_scaling = spec.alpha / spec.rank


def _adapt_modules(model: PreTrainedModel, targets: list[str], spec: LoraSpec) -> None:
    # Few runs have adapters, and this import takes a tenth of a trainer's startup time.
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # type: ignore[arg-type]  # any number scales
        target_modules=targets,
        # Without a tower, peft warns that nothing was excluded.
        exclude_modules=rf"0\.{re.escape(TOWER)}.*" if vision_tower(model) is not None else None,
        lora_dropout=0.0,
        bias="none",
    )
    try:
        # If peft knows a mixture of experts by its configuration, it adapts the fused experts instead of
        # modules with the names of their parts, such as up_proj of a shared expert. A ModuleList has no
        # configuration.
        inject_adapter_in_model(config, nn.ModuleList([model]))
    except ValueError as error:
        raise ValueError(
            f"trainer.lora.target_modules {targets} cannot be adapted: {error}"
        ) from error


@torch.no_grad()
def begin_adapters(module: nn.Module, *, seed: int) -> None:
    """Initializes adapters in place: random down-projections as in peft, zero up-projections.

    The values depend only on the seed and the names, not on how the parameters are sharded.
    """
    for name, parameter in module.named_parameters():
        if not is_adapter(name):
            continue
        start = torch.zeros(parameter.shape)
        if "lora_A" in name:
            bound = 1.0 / math.sqrt(parameter.shape[-1])
            generator = torch.Generator().manual_seed(seed ^ crc32(plain_name(name).encode()))
            start.uniform_(-bound, bound, generator=generator)
        local_part(parameter).copy_(start[_held(parameter)])


def _held(tensor: Tensor) -> tuple[slice, ...]:
    if not isinstance(tensor, DTensor):
        return (slice(None),)
    layout = tensor.shape, tensor.device_mesh, tensor.placements
    sizes, firsts = compute_local_shape_and_global_offset(*layout)
    return tuple(slice(first, first + size) for size, first in zip(sizes, firsts, strict=True))


def merged_parameters(model: nn.Module, *, merges: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yields whole parameters under their Hugging Face names, with adapters merged into their weights.

    A model without adapters yields its parameters. All ranks must iterate if they are sharded.

    Args:
        merges: True if adapters are merged; otherwise they are left out.
    """
    for name, tensor in _without_adapters(model):
        value = tensor.weight if isinstance(tensor, QuantizedLinear) else whole(tensor)
        owner, base, leaf = name.partition(_BASE)
        if base and leaf == "weight" and merges:
            value = merged_weight(value, *_scaled_adapter(model.get_submodule(owner)))
        elif merges and OF_EXPERTS in name:
            value = _merged_experts(model, name, value)
        yield plain_name(name), value


def _merged_experts(model: nn.Module, name: str, value: Tensor) -> Tensor:
    """Returns a parameter of a layer's experts, with its adapter merged if it has one."""
    owner, _, leaf = name.rpartition(".")
    experts: Any = model.get_submodule(owner)
    down, up = (getattr(experts, adapter, None) for adapter in expert_adapter(leaf))
    if down is None or up is None:
        return value
    change = experts.lora_scaling * (whole(up) @ whole(down))
    merged: Tensor = value.float() + (change.mT if experts.is_transposed else change)
    return merged.to(value.dtype)


def merged_shapes(model: nn.Module) -> list[tuple[str, torch.Size]]:
    """Returns names and shapes of what :func:`merged_parameters` yields, in its order."""
    return [
        (plain_name(name), torch.Size((tensor.out_features, tensor.in_features)))
        if isinstance(tensor, QuantizedLinear)
        else (plain_name(name), tensor.shape)
        for name, tensor in _without_adapters(model)
    ]


def _without_adapters(model: nn.Module) -> Iterator[tuple[str, Tensor | QuantizedLinear]]:
    """Yields the stored tensors and the quantized layers by the names of their weights."""
    leaves: dict[str, Tensor | QuantizedLinear] = {
        **stored_tensors(model),
        **quantized_layers(model),
    }
    return ((name, value) for name, value in leaves.items() if _ADAPTER not in name)


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields whole adapters, scaled so that their product is what they add to the weight.

    All ranks must iterate if they are sharded.
    """
    for owner, layer in _adapted(model):
        down, up = _scaled_adapter(layer)
        yield owner + LORA_DOWN, down
        yield owner + LORA_UP, up


def _scaled_adapter(layer: Any) -> tuple[Tensor, Tensor]:
    """Gathers ``[r, in]`` and ``[out, r]`` float32, whose product is what is added to the weight."""
    (adapter,) = layer.active_adapters
    down, up = whole(layer.lora_A[adapter].weight), whole(layer.lora_B[adapter].weight)
    return down, layer.scaling[adapter] * up


def adapter_shapes(model: nn.Module) -> list[tuple[str, torch.Size]]:
    """Returns names and shapes of what :func:`adapter_parameters` yields, in its order."""
    return [
        (owner + end, adapter[layer.active_adapters[0]].weight.shape)
        for owner, layer in _adapted(model)
        for end, adapter in ((LORA_DOWN, layer.lora_A), (LORA_UP, layer.lora_B))
    ]


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, layer) for name, layer in model.named_modules() if hasattr(layer, "lora_A"))


def is_adapter(name: str) -> bool:
    """Returns True if a parameter is part of an adapter."""
    return _ADAPTER in name


def plain_name(name: str) -> str:
    """Returns the name of a parameter in a model without adapters."""
    return name.replace(_BASE, ".")


def whole(value: Tensor) -> Tensor:
    """Gathers a tensor from its shards. All ranks must call it."""
    gathered = value.full_tensor() if isinstance(value, DTensor) else value
    return gathered.detach()
