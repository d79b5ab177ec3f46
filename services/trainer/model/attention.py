"""Attention over packed sequences that cannot see each other.

Registered with transformers under :data:`PACKED`, so any model with that implementation takes the
layout of the pack as the keyword ``layout`` of its forward pass. No mask is ever built: on a GPU in
half precision torch's variable-length kernel takes the sequence boundaries; elsewhere sequences of
similar length run as one causal batch, whose padding rows come last and so cannot be attended to.
"""

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.comptime import comptime
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from services.trainer.transfer import on_device

PACKED = "slipstream_packed"
# Before torch 2.12 the kernel took fewer key-value heads without being told.
_takes_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters
_varlen_kernel: Any = partial(varlen_attn, enable_gqa=True) if _takes_gqa else varlen_attn
_MAX_PADDING = 1.25
"""A causal batch may hold this many times the tokens of its sequences."""


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """Where the sequences of a pack begin and end."""

    cu_lengths: Tensor
    """``[N + 1]`` int32 offsets of the sequences, and the total."""
    max_length: int
    """Longest sequence."""
    batches: tuple[Tensor, ...]
    """Causal batches: ``[B, L]`` int64 token positions; a padded place repeats position 0."""
    gather: Tensor
    """``[T]`` int64: where each token lies in the batches, laid end to end."""


def build_layout(lengths: list[int], device: torch.device) -> AttentionLayout:
    """Plan the attention of a pack.

    Args:
        lengths: Tokens of each sequence, in the order of the pack.
        device: Of the model.
    """
    count = torch.tensor(lengths, dtype=torch.int64)
    ends = torch.cumsum(count, 0)
    starts = ends - count
    cu_lengths = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32)
    gather = torch.empty(int(ends[-1]), dtype=torch.int64)
    batches, filled = [], 0
    for rows in _similar(lengths):
        width = lengths[rows[0]]
        columns = torch.arange(width)
        positions = starts[rows, None] + columns
        valid = columns < count[rows, None]
        places = torch.arange(filled, filled + valid.numel()).view_as(valid)
        gather[positions[valid]] = places[valid]
        batches.append(on_device(torch.where(valid, positions, 0), device))
        filled += valid.numel()
    return AttentionLayout(
        cu_lengths=on_device(cu_lengths, device),
        max_length=max(lengths),
        batches=tuple(batches),
        gather=on_device(gather, device),
    )


def _similar(lengths: list[int]) -> list[list[int]]:
    """Indexes, longest first, cut where a batch would hold too much padding."""
    order = [index for index in range(len(lengths)) if lengths[index] > 0]
    order.sort(key=lambda index: -lengths[index])
    groups: list[list[int]] = []
    tokens = 0
    for index in order:
        width = lengths[groups[-1][0]] if groups else 0
        fits = groups and width * (len(groups[-1]) + 1) <= _MAX_PADDING * (tokens + lengths[index])
        if not fits:
            groups.append([])
            tokens = 0
        groups[-1].append(index)
        tokens += lengths[index]
    return groups


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    layout: AttentionLayout,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence of a pack.

    Args:
        module: The attention layer.
        query: ``[1, heads, T, D]``.
        key: ``[1, kv_heads, T, D]``.
        value: ``[1, kv_heads, T, D]``.
        attention_mask: Always None.
        scaling: Factor of the scores; default ``D ** -0.5``.
        layout: Boundaries of the sequences.

    Returns:
        ``[1, T, heads, D]``, and no attention weights.
    """
    assert attention_mask is None, f"{type(module).__name__} built a mask for a packed batch"
    if torch.compiler.is_compiling():
        # Only the number of tokens may vary in what is compiled: a kernel for any head size divides by it for
        # every element, and takes several times as long as the copy that it is.
        comptime.force_static(module.head_dim)
    flat = [states[0].transpose(0, 1) for states in (query, key, value)]
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _varlen(*flat, scaling=scaling, layout=layout)[None], None
    output: Tensor = _batched(*flat, scaling=scaling, layout=layout)
    return output[None], None


# The number of batches differs from pack to pack, and each would be another graph.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _batched(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, layout: AttentionLayout
) -> Tensor:
    outputs = []
    for positions in layout.batches:
        q, k, v = (
            tensor[positions.flatten()].view(*positions.shape, *tensor.shape[1:]).transpose(1, 2)
            for tensor in (query, key, value)
        )
        output = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[layout.gather]


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, layout: AttentionLayout
) -> Tensor:
    output: Tensor = _varlen_kernel(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        layout.cu_lengths,
        layout.cu_lengths,
        layout.max_length,
        layout.max_length,
        scale=scaling,
        window_size=(-1, 0),
    )
    return output


AttentionInterface.register(PACKED, packed_attention)
