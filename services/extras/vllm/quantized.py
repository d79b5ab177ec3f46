"""Quantizes received weights into the parameters that a vLLM model serves, layer by layer, and verifies them.

A layer's parameters are assembled from checkpoint tensors by the rules of
:mod:`services.extras.external_engine.layout`, quantized once by the layer's own method, as when vLLM loads a
checkpoint, and copied into the live parameters, whose addresses CUDA graphs hold. The live bits are then
compared with the quantized ones. At most one layer is in memory besides the model.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

from services.extras.external_engine.layout import Piece, Shape, plan_pieces

_SMALL = 1 << 16
"""Bytes below which parameters are compared together."""
_COMPARED_BYTES = 1 << 29
"""Max bytes that are compared at once; a comparison needs a byte for each word."""
_DONE = "_already_called_process_weights_after_loading"
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    """Blocks by the name of the layer's parameter, in the order of their rows or columns."""
    sources: set[str] = field(default_factory=set)
    """Names of the tensors that the layer is made of."""


class QuantizedUpdate:
    """One replacement of all weights of a model, which must not run during the replacement."""

    def __init__(
        self,
        model: nn.Module,
        vllm_config: Any,
        shapes: Mapping[str, Shape],
        *,
        rank: int,
        ranks: int,
    ) -> None:
        """Plans the replacement; changes nothing yet.

        Args:
            shapes: Shapes of all tensors that will be received, by checkpoint name.
            rank: Rank of tensor parallelism.
            ranks: Number of ranks of tensor parallelism.

        Raises:
            UnknownLayoutError: If it is unknown which tensors make up a layer.
        """
        self._config = vllm_config
        self._layers = dict(_planned_layers(model, tuple(shapes.items()), rank, ranks))
        self._missing = {owner: set(layer.sources) for owner, layer in self._layers.items()}
        self._owners: dict[str, set[str]] = {name: set() for name in shapes}
        """Layers that a tensor is still needed for."""
        for owner, sources in self._missing.items():
            for name in sources:
                self._owners[name].add(owner)
        self._received: dict[str, Tensor] = {}
        self._differs: dict[str, Tensor] = {}
        self._small: dict[str, tuple[Tensor, Tensor]] = {}
        """Live and received values of small parameters."""

    @property
    def is_complete(self) -> bool:
        """True if all tensors were received."""
        return not self._layers

    @torch.no_grad()
    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Receives tensors, which must not change until all were received; replaces complete layers."""
        with set_current_vllm_config(self._config):
            for name, tensor in tensors:
                self._received[name] = tensor
                for owner in sorted(self._owners[name]):
                    self._missing[owner].discard(name)
                    if not self._missing[owner]:
                        self._replace(owner, self._layers.pop(owner))

    def finish(self) -> list[str]:
        """Returns the names of parameters that differ from the received weights."""
        if self._small and _differ(*map(_bytes, zip(*self._small.values(), strict=True))):
            self._differs |= {name: _differ(*pair) for name, pair in self._small.items()}
        flags = torch.stack([*self._differs.values()]).tolist() if self._differs else []
        return [name for name, differs in zip(self._differs, flags, strict=True) if differs]

    def _replace(self, owner: str, layer: _Layer) -> None:
        tensors = {name: self._whole(pieces) for name, pieces in layer.pieces.items()}
        if layer.is_quantizing:
            tensors = _quantized(layer.module, tensors)
        for name, value in tensors.items():
            live = getattr(layer.module, name).detach()
            if not layer.is_quantizing:
                # The engine pads vocabularies.
                live = live.narrow(0, 0, len(value)) if value.dim() else live
                value = value.to(live.dtype)
            parameter, is_alike = f"{owner}.{name}", _are_alike(live, value)
            if is_alike:
                live.copy_(value)
            if is_alike and value.nbytes < _SMALL:
                self._small[parameter] = live, value.detach()
            else:
                self._differs[parameter] = _differ(live, value)
        for name in layer.sources:
            self._owners[name].discard(owner)
            if not self._owners[name]:
                del self._received[name]

    def _whole(self, pieces: Sequence[Piece]) -> Tensor:
        """Returns a parameter as it is before it is quantized."""
        blocks = [
            self._received[piece.source].narrow(piece.dim, piece.start, piece.length)
            for piece in pieces
        ]
        # Some quantization methods change the weights of experts in place, so these are copied.
        is_shared = len(blocks) == 1 and blocks[0].dim() <= 2 and blocks[0].is_contiguous()
        return blocks[0] if is_shared else torch.cat(blocks, dim=pieces[0].dim)


class QuantizedWriter:
    """Receives weights bucket by bucket for a model that quantizes them.

    Args:
        slots: Shared buffers by name.
        shapes: Shapes of all tensors by name.

    Attributes:
        differing: Names of parameters that differ from the received weights, once all were received.
    """

    def __init__(
        self, slots: Mapping[str, Tensor], shapes: Mapping[str, Shape], update: QuantizedUpdate
    ) -> None:
        self.differing: list[str] = []
        self._slots, self._shapes, self._update = slots, shapes, update
        self._tensors: dict[str, tuple[Tensor, int]] = {}

    def write(self, slot: str, segments: Sequence[Sequence[Any]]) -> None:
        complete = []
        for name, dtype, first, begin, end in segments:
            values = self._slots[slot][begin:end].view(getattr(torch, dtype))
            if name not in self._tensors:
                self._tensors[name] = values.new_empty(prod(self._shapes[name])), 0
            tensor, num_received = self._tensors[name]
            index = first // values.itemsize
            tensor[index : index + len(values)] = values
            self._tensors[name] = tensor, num_received + len(values)
            if num_received + len(values) == len(tensor):
                del self._tensors[name]
                complete.append((name, tensor.view(self._shapes[name])))
        self._update.add(complete)
        if self._update.is_complete:
            self.differing = self._update.finish()


@lru_cache(maxsize=1)
def _planned_layers(
    model: nn.Module, shapes: tuple[tuple[str, Shape], ...], rank: int, ranks: int
) -> dict[str, _Layer]:
    """Returns the layers with parameters by name; computed once for all versions of a model.

    Raises:
        UnknownLayoutError: If it is unknown which tensors make up a layer.
    """
    modules, targets = dict(model.named_modules()), {}
    for name, live in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        # Skips scales, which a layer has only after it is quantized.
        before = get_layerwise_info(modules[owner]).restore_metadata[0].get(leaf)
        if before is not None or leaf in SKIP_TENSORS:
            targets[name] = tuple(live.shape if before is None else before.shape)
    layers: dict[str, _Layer] = {}
    # Experts are in order before they are quantized; kernels reorder them afterwards.
    pieces = plan_pieces(dict(shapes), targets, rank=rank, ranks=ranks, has_plain_experts=True)
    for piece in sorted(pieces, key=lambda piece: piece.target_start):
        owner, _, leaf = piece.target.rpartition(".")
        if owner not in layers:
            layers[owner] = _Layer(modules[owner], _is_quantizing(modules[owner]))
        layers[owner].pieces.setdefault(leaf, []).append(piece)
        layers[owner].sources.add(piece.source)
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
        # Methods of experts store the kernel that they prepared for the copy.
        method.__dict__.clear()
        method.__dict__.update(state)
    return {
        name: value
        for name, value in copied._parameters.items()  # noqa: SLF001
        if value is not None
    }


def _differ(first: Tensor, second: Tensor) -> Tensor:
    """Returns a scalar on the tensors' device: True if any bit differs."""
    if not _are_alike(first, second):
        return torch.ones((), dtype=torch.bool, device=first.device)
    first, second = _words(first.detach(), second.detach())
    rows = max(1, _COMPARED_BYTES // max(1, first.itemsize * prod(first.shape[1:])))
    flags = [(a != b).any() for a, b in zip(first.split(rows), second.split(rows), strict=True)]
    return flags[0] if len(flags) == 1 else torch.stack(flags).any()


def _are_alike(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype


def _bytes(tensors: Iterable[Tensor]) -> Tensor:
    """Returns ``[n]`` uint8: the bytes of all tensors."""
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])


def _words(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Views the bits of two tensors of one shape as integers, if possible eight bytes at once."""
    if first.stride() == second.stride():
        # Quantized weights are stored transposed.
        order = sorted(range(first.dim()), key=first.stride, reverse=True)
        first, second = first.permute(order), second.permute(order)
    size = first.itemsize
    is_dense = all(
        tensor.is_contiguous()
        and tensor.data_ptr() % 8 == 0
        and tensor.storage_offset() * size % 8 == 0
        for tensor in (first, second)
    )
    if is_dense and first.numel() * size % 8 == 0:
        return first.reshape(-1).view(torch.int64), second.reshape(-1).view(torch.int64)
    word = _WORDS[size]
    first, second = first.view(word), second.view(word)
    return (first.view(1), second.view(1)) if first.dim() == 0 else (first, second)
