"""Loads weights into a vLLM model that quantizes them, layer by layer, and verifies what then serves.

vLLM's layerwise reload gives a layer memory in the checkpoint's dtype, loads it, quantizes it, and copies the
result to the layer's parameters, whose addresses CUDA graphs hold. This module sends it whole layers, so that
at most one is in memory besides the model. It then quantizes the received weights a second time, with the
layer's own method, and compares the bits with those of the live parameters: a weight that is missing, old,
misplaced or from another layer differs.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

from services.common.models.experts import checkpoint_names
from services.rollout.engines.layout import Piece, Shape, plan_pieces

_COMPARED = 1 << 26
"""Max values that are compared at once; a comparison needs a byte for each."""
_DONE = "_already_called_process_weights_after_loading"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def quantizes(model: nn.Module) -> bool:
    """Returns True if some layers quantize the weights that they load."""
    return any(map(_is_quantizing, model.modules()))


def _is_quantizing(layer: nn.Module) -> bool:
    return bool(getattr(getattr(layer, "quant_method", None), "uses_meta_device", False))


@dataclass(slots=True)
class _Layer:
    """A layer of the model and the blocks of checkpoint tensors that it is made of."""

    module: nn.Module
    is_quantizing: bool
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    """Blocks by the name of the layer's parameter."""
    shapes: dict[str, Shape] = field(default_factory=dict)
    """Shapes of these parameters before they are quantized."""

    @property
    def sources(self) -> set[str]:
        """Names of the tensors that the layer is made of."""
        return {piece.source for pieces in self.pieces.values() for piece in pieces}


class QuantizedReload:
    """One replacement of all weights of a model, which must not run meanwhile."""

    def __init__(
        self,
        model: Any,
        vllm_config: Any,
        shapes: Mapping[str, Shape],
        *,
        rank: int,
        ranks: int,
        loading: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Prepares the model for new weights.

        Args:
            shapes: Shapes of all tensors that will be received, by checkpoint name.
            rank: Rank of tensor parallelism.
            ranks: Number of ranks of tensor parallelism.
            loading: Context in which the model's own loader runs.

        Raises:
            UnknownLayoutError: If it is unknown which tensors make up a layer.
        """
        self._model, self._config, self._loading = model, vllm_config, loading
        self._text = vllm_config.model_config.hf_config.to_dict()
        if any(get_layerwise_info(layer).can_load() for layer in model.modules()):
            # The previous replacement was not finished.
            with set_current_vllm_config(vllm_config):
                finalize_layerwise_reload(model, vllm_config.model_config)
        self._layers = _planned_layers(model, shapes, rank=rank, ranks=ranks)
        self._missing = {owner: layer.sources for owner, layer in self._layers.items()}
        self._owners = {
            name: [owner for owner, sources in self._missing.items() if name in sources]
            for name in shapes
        }
        self._received: dict[str, Tensor] = {}
        self._differs: dict[str, Tensor] = {}
        with set_current_vllm_config(vllm_config):
            initialize_layerwise_reload(model)

    @property
    def is_complete(self) -> bool:
        """True if all tensors were received."""
        return not any(self._missing.values())

    @torch.no_grad()
    def add(self, name: str, tensor: Tensor) -> None:
        """Receives a tensor, whose values must not change until :meth:`finish`, and loads complete layers."""
        self._received[name] = tensor
        for owner in self._owners[name]:
            self._missing[owner].discard(name)
            if not self._missing[owner]:
                self._load(owner, self._layers[owner])

    @torch.no_grad()
    def finish(self) -> list[str]:
        """Ends the replacement; returns the names of parameters that differ from the received weights."""
        with set_current_vllm_config(self._config):
            finalize_layerwise_reload(self._model, self._config.model_config)
            for owner, layer in self._layers.items():
                self._check(owner, layer)
        self._layers.clear()
        self._received.clear()
        differs = torch.stack([*self._differs.values()]).tolist()
        return [name for name, one in zip(self._differs, differs, strict=True) if one]

    def _load(self, owner: str, layer: _Layer) -> None:
        loaded = [
            part
            for name in sorted(layer.sources)
            for part in checkpoint_names(name, self._received[name], self._text)
        ]
        with set_current_vllm_config(self._config), self._loading():
            self._model.load_weights(iter(loaded))
            if get_layerwise_info(layer.module).can_load():
                return  # its parameters have padding, so vLLM ends it last
            self._check(owner, layer)
        del self._layers[owner]
        for name in layer.sources:
            if not any(name in other.sources for other in self._layers.values()):
                del self._received[name]

    def _check(self, owner: str, layer: _Layer) -> None:
        if not layer.is_quantizing:
            for name, pieces in layer.pieces.items():
                live = getattr(layer.module, name)
                places = [live.narrow(p.dim, p.target_start, p.length) for p in pieces]
                blocks = [self._block(piece).to(live.dtype) for piece in pieces]
                found = [_differ(*pair) for pair in zip(places, blocks, strict=True)]
                self._differs[f"{owner}.{name}"] = torch.stack(found).any()
            return
        for name, expected in _quantized(layer.module, self._whole(layer)).items():
            live = getattr(layer.module, name)
            self._differs[f"{owner}.{name}"] = _differ(live, expected)

    def _block(self, piece: Piece) -> Tensor:
        return self._received[piece.source].narrow(piece.dim, piece.start, piece.length)

    def _whole(self, layer: _Layer) -> dict[str, Tensor]:
        """Returns the layer's parameters before they are quantized."""
        found = {}
        for name, pieces in layer.pieces.items():
            first = self._block(pieces[0])
            whole = first.new_zeros(layer.shapes[name])
            for piece in pieces:
                place = whole.narrow(piece.dim, piece.target_start, piece.length)
                place.copy_(self._block(piece))
            found[name] = whole
        return found


class QuantizedWriter:
    """Receives weights bucket by bucket for a model that quantizes them.

    Args:
        slots: Shared buffers by name.
        shapes: Shapes of all tensors by name.

    Attributes:
        differing: Names of parameters that differ from the received weights, once all were received.
    """

    def __init__(
        self, slots: Mapping[str, Tensor], shapes: Mapping[str, Shape], reload: QuantizedReload
    ) -> None:
        self.differing: list[str] = []
        self._slots, self._shapes, self._reload = slots, shapes, reload
        self._tensors: dict[str, tuple[Tensor, int]] = {}

    def write(self, slot: str, parts: Sequence[Sequence[Any]]) -> None:
        """Takes a slot's parts: name, dtype, first byte in the tensor, begin and end byte in the slot."""
        for name, dtype, first, begin, end in parts:
            values = self._slots[slot][begin:end].view(getattr(torch, dtype))
            if name not in self._tensors:
                self._tensors[name] = values.new_empty(prod(self._shapes[name])), 0
            tensor, num_received = self._tensors[name]
            index = first // values.itemsize
            tensor[index : index + len(values)] = values
            self._tensors[name] = tensor, num_received + len(values)
            if num_received + len(values) == len(tensor):
                del self._tensors[name]
                self._reload.add(name, tensor.view(self._shapes[name]))
        if self._reload.is_complete:
            self.differing = self._reload.finish()


def _planned_layers(
    model: nn.Module, shapes: Mapping[str, Shape], *, rank: int, ranks: int
) -> dict[str, _Layer]:
    """Returns the layers with parameters by name.

    Raises:
        UnknownLayoutError: If it is unknown which tensors make up a layer.
    """
    modules, targets = dict(model.named_modules()), {}
    for name, live in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        # Scales are no parameters of the checkpoint's form.
        before = get_layerwise_info(modules[owner]).restore_metadata[0].get(leaf)
        if before is not None or leaf in SKIP_TENSORS:
            targets[name] = tuple(live.shape if before is None else before.shape)
    layers: dict[str, _Layer] = {}
    # Experts are in order before they are quantized; kernels reorder them afterwards.
    for piece in plan_pieces(shapes, targets, rank=rank, ranks=ranks, has_plain_experts=True):
        owner, _, leaf = piece.target.rpartition(".")
        if owner not in layers:
            layers[owner] = _Layer(modules[owner], _is_quantizing(modules[owner]))
        layers[owner].pieces.setdefault(leaf, []).append(piece)
        layers[owner].shapes[leaf] = targets[piece.target]
    return layers


def _quantized(layer: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Quantizes weights as a layer does; returns its parameters by name and leaves it unchanged."""
    copied = copy.copy(layer)
    copied.__dict__.pop(_DONE, None)
    copied._parameters = {  # noqa: SLF001 -- a second layer with the same settings
        name: nn.Parameter(value, requires_grad=False) for name, value in weights.items()
    }
    copied._buffers = dict(layer._buffers)  # noqa: SLF001
    method: Any = layer.quant_method
    state = dict(method.__dict__)
    try:
        method.process_weights_after_loading(copied)
    finally:
        # Methods of experts keep the kernel that they prepared.
        method.__dict__.clear()
        method.__dict__.update(state)
    return {
        name: value
        for name, value in copied._parameters.items()  # noqa: SLF001
        if value is not None
    }


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Returns a scalar on the tensors' device: True if any bit differs."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return torch.ones((), dtype=torch.bool, device=one.device)
    bits = _BITS[one.element_size()]
    one, other = one.detach().view(bits), other.detach().view(bits)
    if one.dim() == 0:
        return one != other
    rows = max(1, _COMPARED // max(1, prod(one.shape[1:])))
    parts = zip(one.split(rows), other.split(rows), strict=True)
    return torch.stack([(a != b).any() for a, b in parts]).any()
