"""Attention over packed sequences: each sequence sees its shared prefix and its own branch.

Registered with transformers under :data:`PACKED`, so any model with that implementation accepts the layout of
the pack as the keyword ``layout`` of its forward pass. On a GPU in half precision a variable-length kernel
(torch's, or FlashAttention 4 if it is installed) takes the boundaries of branches and of their keys, copied
to each branch. A flex kernel is used instead if scores are capped, heads have sinks, or copies would be too
many. Otherwise branches of similar length run as one batch, whose padding is masked.

Under the names in :data:`PACKED_AS`, the forward pass computes each query as an engine does when it decodes
(``rollout.reproducible: batch_invariant``); its gradients are those of the other kernels.
"""

import inspect
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._dynamo.comptime import comptime
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from services.common.memory.trainer import HEAD_MULTIPLE
from services.common.models import vllm_operators
from services.common.models.invariant import invariant_attention
from services.common.runspec.engines import InvariantEngine
from services.trainer.batch import flash
from services.trainer.batch.context import ContextRanks
from services.trainer.batch.layout import AttentionBatch, AttentionLayout

PACKED = "slipstream_packed"
PACKED_AS: Final[dict[InvariantEngine | None, str]] = {
    None: PACKED,
    "torch": "slipstream_packed_as_torch",
    "vllm": "slipstream_packed_as_vllm",
}
"""Name of the attention in transformers, by the engine whose operators it uses; None: ordinary operators."""
# Before torch 2.12 the kernel supported fewer key-value heads without this argument.
_takes_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters
_varlen_kernel: Any = partial(varlen_attn, enable_gqa=True) if _takes_gqa else varlen_attn


@dataclass(frozen=True, slots=True)
class Scores:
    """Parameters by which a layer turns queries and keys into attention weights."""

    scaling: float
    """Factor of the products."""
    window: int | None = None
    """Number of tokens that are attended to, including the query's own; None for all earlier ones."""
    cap: float | None = None
    """Scores are ``cap * tanh(score / cap)`` (Gemma 2)."""
    sinks: Tensor | None = None
    """``[heads]``: score of each head that takes weight and contributes nothing (gpt-oss)."""

    @property
    def are_plain(self) -> bool:
        """True if torch's fused kernels can compute them."""
        return self.cap is None and self.sinks is None


def packed_attention(  # noqa: PLR0913 -- transformers decides its arguments
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    layout: AttentionLayout,
    context: ContextRanks | None = None,
    engine: InvariantEngine | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Computes causal attention inside each sequence of a pack, along its own path.

    Args:
        query: ``[1, heads, T, D]``.
        key: ``[1, kv_heads, T, D]``.
        value: ``[1, kv_heads, T, D]``.
        attention_mask: Always None.
        scaling: Factor of the scores; default ``D ** -0.5``.
        sliding_window: See :attr:`Scores.window`.
        softcap: See :attr:`Scores.cap`.
        s_aux: See :attr:`Scores.sinks`.
        context: Ranks that compute the pack together; ``T`` is then the number of this rank's tokens.
        engine: Engine whose operators compute, so that a token's result does not depend on other packed
            sequences. The states may then have more tokens than the layout: padding at the end, whose
            results are 0.

    Returns:
        ``[1, T, heads, D]``, and no attention weights.
    """
    assert attention_mask is None, f"{type(module).__name__} built a mask for a packed batch"
    if torch.compiler.is_compiling():
        # Only the number of tokens is dynamic in compiled code: a copy kernel for any head size divides by
        # that size for every element, and takes several times as long.
        for size in ("head_dim", "qk_head_dim", "v_head_dim"):
            if hasattr(module, size):
                comptime.force_static(getattr(module, size))
    if context is not None:
        num_tokens = len(layout.ends)
        query, key, value = (context.to_heads(heads, num_tokens) for heads in (query, key, value))
        s_aux = None if s_aux is None else context.local_heads(s_aux)
    scores = Scores(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        cap=softcap,
        sinks=s_aux,
    )
    if engine is not None:
        inputs = query, key, value, scores, layout, engine
        invariant: Tensor = _InvariantAttention.apply(*inputs)  # type: ignore[no-untyped-call]
        return invariant, None
    output = _packed(query, key, value, scores=scores, layout=layout)
    return output if context is None else context.to_tokens(output), None


def _packed(
    query: Tensor, key: Tensor, value: Tensor, *, scores: Scores, layout: AttentionLayout
) -> Tensor:
    """Computes ``[1, T, heads, D]`` with the suitable kernel."""
    copies_too_much = layout.paths is not None and layout.paths.are_many
    if query.is_cuda and (copies_too_much or not scores.are_plain):
        flexed: Tensor = _flex(query, key, value, scores=scores, layout=layout)
        return flexed
    flat = [states[0].transpose(0, 1) for states in (query, key, value)]
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _varlen(*flat, scores=scores, layout=layout)[None]
    output: Tensor = _batched(*flat, scores=scores, layout=layout)
    return output[None]


class _InvariantAttention(torch.autograd.Function):
    """Computes each query like an engine that decodes it; the gradients are those of the packed kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scores: Scores,
        layout: AttentionLayout,
        engine: InvariantEngine,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scores, ctx.layout = scores, layout
        flat = [states[0].transpose(0, 1) for states in (query, key, value)]
        output: Tensor
        if engine == "vllm":
            output = _as_vllm(*flat, scores=scores, layout=layout)
        else:
            output = _batched(*flat, scores=scores, layout=layout, is_invariant=True)
        return functional.pad(output, (0, 0, 0, 0, 0, query.shape[2] - len(output)))[None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        length = len(ctx.layout.ends)
        padding = ctx.saved_tensors[0].shape[2] - length
        with torch.enable_grad():
            leaves = [leaf[:, :, :length].detach().requires_grad_() for leaf in ctx.saved_tensors]
            output = _packed(*leaves, scores=ctx.scores, layout=ctx.layout)
        grads = torch.autograd.grad(output, leaves, grad[:, :length])
        return *(functional.pad(leaf, (0, 0, 0, padding)) for leaf in grads), None, None, None


# The number of batches differs from pack to pack, and the compiler would make a graph for each number.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _batched(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scores: Scores,
    layout: AttentionLayout,
    is_invariant: bool = False,
) -> Tensor:
    outputs = []
    for batch in layout.batches:
        keys = batch.queries if batch.keys is None else batch.keys
        q, k, v = (
            tensor[rows.flatten()].view(*rows.shape, *tensor.shape[1:]).transpose(1, 2)
            for tensor, rows in ((query, batch.queries), (key, keys), (value, keys))
        )
        if is_invariant:
            visible = _visible(batch, scores.window)
            output = invariant_attention(q, k, v, visible, scaling=scores.scaling)
        else:
            output = _attend(q, k, v, scores, batch)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[layout.gather]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, batch: AttentionBatch
) -> Tensor:
    """Computes ``[B, heads, L, D]`` of a batch; keys and values may have fewer heads."""
    has_window = scores.window is not None and scores.window < key.shape[2]
    window = scores.window if has_window else None
    if scores.are_plain:
        is_causal = batch.keys is None and not has_window
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if is_causal else _visible(batch, window),
            is_causal=is_causal,
            scale=scores.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    repeats = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(repeats, 1) for states in (key, value))
    products = (query @ key.transpose(2, 3) * scores.scaling).float()
    if scores.cap is not None:
        products = scores.cap * torch.tanh(products / scores.cap)
    products = products.masked_fill(~_visible(batch, window), -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.float().view(1, -1, 1, 1).expand(*products.shape[:3], 1)
        products = torch.cat([products, sinks], -1)
    weights = torch.softmax(products, -1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value


def _visible(batch: AttentionBatch, window: int | None) -> Tensor:
    """Returns ``[B, 1, L, K]`` bool: the keys that each query sees."""
    if window not in batch.visible:
        keys = batch.queries if batch.keys is None else batch.keys
        distance = batch.depths[:, :, None] - torch.arange(keys.shape[1], device=keys.device)
        visible = distance >= 0
        visible = visible if window is None else visible & (distance < window)
        batch.visible[window] = visible[:, None]
    return batch.visible[window]


def _as_vllm(
    query: Tensor, key: Tensor, value: Tensor, *, scores: Scores, layout: AttentionLayout
) -> Tensor:
    paths = layout.paths
    if paths is not None:
        key, value = key[paths.places], value[paths.places]
    return vllm_operators.attention(
        query,
        key,
        value,
        cu_queries=layout.cu_lengths,
        cu_keys=layout.cu_lengths if paths is None else paths.cu_lengths,
        max_queries=layout.max_length,
        max_keys=layout.max_length if paths is None else paths.max_length,
        scaling=scores.scaling,
    )


def copied_rows(states: Tensor, rows: Tensor) -> Tensor:
    """Returns the rows ``[K, ...]`` of a tensor at some places; sums gradients in float32."""
    copied: Tensor = _CopyRows.apply(states, rows)  # type: ignore[no-untyped-call]
    return copied


class _CopyRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows = states.shape[0]
        return states.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        # A prompt receives as many gradients as its group has members.
        total = grad.new_zeros((ctx.num_rows, *grad.shape[1:]), dtype=torch.float32)
        return total.index_add_(0, rows, grad.float()).to(grad.dtype), None


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, *, scores: Scores, layout: AttentionLayout
) -> Tensor:
    cu_lengths, max_length = layout.cu_lengths, layout.max_length
    if layout.paths is not None:
        cu_lengths, max_length = layout.paths.cu_lengths, layout.paths.max_length
        key = copied_rows(key, layout.paths.places)
        value = copied_rows(value, layout.paths.places)
    # The last query of a branch is at its last key: the kernel aligns both at their ends.
    width = value.shape[-1]
    # The kernel needs values as wide as keys, in a multiple of its head size; latent attention has others.
    size = -(-key.shape[-1] // HEAD_MULTIPLE) * HEAD_MULTIPLE
    query, key, value = (
        functional.pad(states, (0, size - states.shape[-1])).contiguous()
        for states in (query, key, value)
    )
    if flash.is_here() and size in flash.HEAD_SIZES:
        return flash.flash_attention(
            query,
            key,
            value,
            cu_queries=layout.cu_lengths,
            cu_keys=cu_lengths,
            max_queries=layout.max_length,
            max_keys=max_length,
            scaling=scores.scaling,
            window=scores.window,
        )[..., :width]
    output: Tensor = _varlen_kernel(
        query,
        key,
        value,
        layout.cu_lengths,
        cu_lengths,
        layout.max_length,
        max_length,
        scale=scores.scaling,
        window_size=(-1 if scores.window is None else scores.window - 1, 0),
    )
    return output[..., :width]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _flex(
    query: Tensor, key: Tensor, value: Tensor, *, scores: Scores, layout: AttentionLayout
) -> Tensor:
    """Computes ``[1, T, heads, D]`` with a kernel compiled for the layout, capped scores and sinks."""
    if scores.window not in layout.block_masks:
        layout.block_masks[scores.window] = _block_mask(layout, scores.window)

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        assert scores.cap is not None
        return scores.cap * torch.tanh(score / scores.cap)

    output, normalizer = _flex_kernel()(
        query,
        key,
        value,
        score_mod=None if scores.cap is None else capped,
        block_mask=layout.block_masks[scores.window],
        scale=scores.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_lse=True,
    )
    if scores.sinks is not None:
        # A sink is one more term in the softmax's denominator.
        share = torch.sigmoid(normalizer - scores.sinks.float()[None, :, None])
        output = output * share[..., None].to(output.dtype)
    result: Tensor = output.transpose(1, 2)
    return result


@cache
def _flex_kernel() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def _block_mask(layout: AttentionLayout, window: int | None) -> BlockMask:
    ends, depths = layout.ends, layout.depths

    def visible(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        sees = (key <= query) & (query < ends[key])
        return sees if window is None else sees & (depths[query] - depths[key] < window)

    total = len(ends)
    return create_block_mask(visible, None, None, total, total, device=str(ends.device))


for _engine, _name in PACKED_AS.items():
    AttentionInterface.register(_name, partial(packed_attention, engine=_engine))
