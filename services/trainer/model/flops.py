"""Floating-point operations of a step and of its device; their ratio is the MFU."""

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from services.common.models.families import num_attention_layers, num_experts, recurrent_shape
from services.common.models.loading import build_model
from services.trainer.model.quantized import quantized_layers

_PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bfloat16 operations per second, by a part of the device's name."""


def active_weights(model: nn.Module, config: PretrainedConfig) -> float:
    """Returns the number of layer weights that are active for a token, including only its chosen experts.

    Args:
        model: The model on any device, sharded or not.
    """
    shape: Any = config
    counts = {True: 0, False: 0}
    for name, parameter in model.named_parameters():
        if ".layers." in name:
            counts[".experts." in name] += parameter.numel()
    for layer in quantized_layers(model).values():
        counts[False] += layer.in_features * layer.out_features
    if not counts[True]:
        return float(counts[False])
    share = float(shape.num_experts_per_tok) / num_experts(shape.to_dict())
    return counts[False] + counts[True] * share


def model_weights(config: PretrainedConfig) -> tuple[float, float]:
    """Returns the number of a model's parameters, and the number of parameters active for a token."""
    model = build_model(config, dtype=torch.float32, device="meta")
    # The output head is the only embedding that multiplies; the input embedding is a lookup.
    head = config.get_text_config()
    return float(sum(p.numel() for p in model.parameters())), active_weights(model, config) + float(
        head.vocab_size * head.hidden_size
    )


def training_flops(
    config: PretrainedConfig, weights: float, *, tokens: float, squares: float, predictions: float
) -> float:
    """Returns the useful operations of one forward and backward pass.

    Padding, recomputation and the optimizer do not count. The forward pass takes ``2 P`` per token in the
    layers' ``P`` weights, ``2 n h L^2`` in causal attention over a sequence, ``2 V h`` per scored token in
    the logits, and per token three products with each state of a recurrent layer. The backward pass takes
    twice as many.

    Args:
        weights: Result of :func:`active_weights`.
        tokens: Tokens that the layers compute; those that sequences share count once.
        squares: Sum of the squared lengths of sequences, minus the squared lengths of shared prefixes.
        predictions: Number of computed logprobs.
    """
    shape: Any = config
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    layers = num_attention_layers(shape.to_dict())
    if hasattr(shape, "qk_head_dim"):
        head = (shape.qk_head_dim + shape.v_head_dim) / 2
    else:
        head = getattr(shape, "head_dim", None) or hidden // heads
    forward = 2.0 * weights * tokens
    forward += 2.0 * layers * heads * head * squares
    if (recurrent := recurrent_shape(shape.to_dict())) is not None:
        forward += 3 * 2.0 * recurrent.num_layers * recurrent.state * tokens
    forward += 2.0 * shape.vocab_size * hidden * predictions
    return 3.0 * float(forward)


def peak_flops(device: torch.device) -> float | None:
    """Returns the dense bfloat16 operations per second of a device; None if unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for model_name, peak in _PEAKS.items() if model_name in name), None)
