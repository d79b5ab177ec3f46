"""How much arithmetic a step needs, and how much its device could do: their ratio is the MFU."""

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PretrainedConfig

_PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bfloat16 operations per second, by a part of the device's name."""


def training_flops(config: PretrainedConfig, lengths: Iterable[int], num_targets: int) -> float:
    """Operations of one forward and backward pass that are of use.

    Padding, recomputation and the optimizer do not count. Forward ``2 P`` per token in the layers' ``P``
    weights, ``2 n h L^2`` in causal attention over a sequence, ``2 V h`` per scored token in the logits; the
    backward pass takes twice as much.

    Args:
        config: Shape of the model.
        lengths: Tokens of each sequence.
        num_targets: Tokens whose logprobs are computed.
    """
    shape: Any = config
    hidden, layers, heads = (
        shape.hidden_size,
        shape.num_hidden_layers,
        shape.num_attention_heads,
    )
    head = getattr(shape, "head_dim", None) or hidden // heads
    attention = 2 * hidden * head * (heads + shape.num_key_value_heads)
    weights = layers * (attention + 3 * hidden * shape.intermediate_size)
    counts = list(lengths)
    forward = 2.0 * weights * sum(counts)
    forward += 2.0 * layers * heads * head * sum(count**2 for count in counts)
    forward += 2.0 * shape.vocab_size * hidden * num_targets
    return 3.0 * float(forward)


def peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 operations per second that a device can do; None if that is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAKS.items() if part in name), None)
