"""Linear layers of a frozen base in 4 or 8 bits, beneath LoRA adapters.

A layer dequantizes its weight for each product and keeps no copy of it, so the backward pass dequantizes it
again. Both passes are custom operators, because a compiler that saw inside would keep the result.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from services.common.models.quantization import (
    BaseDtype,
    dequantize,
    is_quantized,
    levels,
    quantize,
    unpack,
    without_padding,
)


def _dequantized(values: Tensor, scales: Tensor, shape: tuple[int, int]) -> Tensor:
    if not values.is_cuda:
        return dequantize(values, scales, shape)
    return without_padding(_one_kernel()(values, scales, levels(values.device)), shape)


@cache
def _one_kernel() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return torch.compile(unpack, dynamic=True)


@torch.library.custom_op("slipstream::quantized_linear", mutates_args=())
def quantized_linear(
    inputs: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, num_out: int
) -> Tensor:
    """Returns ``[..., out]``: the product of ``[..., in]`` with a quantized weight, plus the bias."""
    return linear(inputs, _dequantized(values, scales, (num_out, inputs.shape[-1])), bias)


@torch.library.custom_op("slipstream::quantized_linear_backward", mutates_args=())
def _backward(gradients: Tensor, values: Tensor, scales: Tensor, num_in: int) -> Tensor:
    return gradients @ _dequantized(values, scales, (gradients.shape[-1], num_in))


@quantized_linear.register_fake
def _(inputs: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, num_out: int) -> Tensor:
    return inputs.new_empty((*inputs.shape[:-1], num_out))


@_backward.register_fake
def _(gradients: Tensor, values: Tensor, scales: Tensor, num_in: int) -> Tensor:
    return gradients.new_empty((*gradients.shape[:-1], num_in))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])
    ctx.num_in = inputs[0].shape[-1]


def _differentiate(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
    return _backward(gradients, *ctx.saved_tensors, ctx.num_in), None, None, None, None


quantized_linear.register_autograd(_differentiate, setup_context=_save)


class QuantizedLinear(nn.Module):
    """A frozen linear layer.

    Args:
        layer: The layer that it replaces; if it is on the meta device, :meth:`set_weight` follows.
    """

    values: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Linear, kind: BaseDtype, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.kind, self.bias = kind, layer.bias
        values, scales = quantize(layer.weight.to(dtype), kind)
        self.register_buffer("values", values, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    @property
    def weight(self) -> Tensor:
        """The dequantized weight ``[out, in]``, computed at each use."""
        return _dequantized(self.values, self.scales, (self.out_features, self.in_features))

    def set_weight(self, weight: Tensor) -> None:
        values, scales = quantize(weight, self.kind)
        self.values.copy_(values)
        self.scales.copy_(scales)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns ``[..., out]`` for ``[..., in]``."""
        output: Tensor = quantized_linear(
            inputs, self.values, self.scales, self.bias, self.out_features
        )
        return output


def quantize_base(model: nn.Module, kind: BaseDtype, *, dtype: torch.dtype) -> None:
    """Replaces the linear layers of a decoder's layers, in place; adapters stay as they are."""
    for name, module in list(model.named_modules()):
        is_adapter = ".lora_" in name
        if not isinstance(module, nn.Linear) or is_adapter:
            continue
        if is_quantized(f".{name}.weight", tuple(module.weight.shape)):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, QuantizedLinear(module, kind, dtype=dtype))


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    return {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }
