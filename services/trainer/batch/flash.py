"""FlashAttention 4 over the sequences of a pack, as torch operators that compile and need no recomputation.

The package (extra ``flash-attention``; Dao et al., https://github.com/Dao-AILab/flash-attention) compiles
its kernels for the GPU on first use and caches them on disk. It is a beta whose autograd function torch's
compiler cannot trace, so its two passes are custom operators here.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_HOPPER = 9
HEAD_SIZES = (64, 128)
"""Head sizes with correct gradients; at 80 they were wrong."""
_NO_WINDOW = -1


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_here() -> bool:
    """Returns True if the kernels are installed and support this GPU."""
    return _is_here()


@cache
def _is_here() -> bool:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != _HOPPER:
        return False
    return find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None


@cache
def _kernels() -> Any:
    return import_module("flash_attn.cute.interface")


def flash_attention(  # noqa: PLR0913 -- as the kernels
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_queries: Tensor,
    cu_keys: Tensor,
    max_queries: int,
    max_keys: int,
    scaling: float,
    window: int | None,
) -> Tensor:
    """Computes causal attention inside each sequence, whose last query is at its last key.

    Args:
        query: ``[T, heads, D]`` in bfloat16 or float16, D one of :data:`HEAD_SIZES`.
        key: ``[K, kv_heads, D]``.
        value: ``[K, kv_heads, D]``.
        cu_queries: ``[N + 1]`` int32 offsets of the sequences' queries, and the total.
        cu_keys: ``[N + 1]`` int32 offsets of the sequences' keys, and the total.
        window: Number of tokens that are attended to, including the query's own; None for all earlier ones.

    Returns:
        ``[T, heads, D]``.
    """
    width = _NO_WINDOW if window is None else window
    output: Tensor = _forward(
        query, key, value, cu_queries, cu_keys, max_queries, max_keys, scaling, width
    )[0]
    return output


@torch.library.custom_op("slipstream::flash_forward", mutates_args=())
def _forward(  # noqa: PLR0913, PLR0917 -- an operator takes tensors and numbers, one by one
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    max_queries: int,
    max_keys: int,
    scaling: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Returns ``[T, heads, D]`` and the logarithm of each softmax's denominator, ``[heads, T]`` float32."""
    output, normalizer, *_ = _kernels()._flash_attn_fwd(  # noqa: SLF001 -- it has no other name
        query,
        key,
        value,
        cu_seqlens_q=cu_queries,
        cu_seqlens_k=cu_keys,
        max_seqlen_q=max_queries,
        max_seqlen_k=max_keys,
        softmax_scale=scaling,
        return_lse=True,
        **_masks(window),
    )
    return output, normalizer


@_forward.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _size = query.shape
    return (
        torch.empty(query.shape, dtype=query.dtype, device=query.device),
        query.new_empty((num_heads, num_tokens), dtype=torch.float32),
    )


@torch.library.custom_op("slipstream::flash_backward", mutates_args=())
def _backward(  # noqa: PLR0913, PLR0917
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    normalizer: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    max_queries: int,
    max_keys: int,
    scaling: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of queries, keys and values."""
    grads = _empty(query, key, value)
    _kernels()._flash_attn_bwd(  # noqa: SLF001
        query,
        key,
        value,
        output,
        grad,
        normalizer,
        softmax_scale=scaling,
        cu_seqlens_q=cu_queries,
        cu_seqlens_k=cu_keys,
        max_seqlen_q=max_queries,
        max_seqlen_k=max_keys,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        dq=grads[0],
        dk=grads[1],
        dv=grads[2],
        **_masks(window),
    )
    return grads


@_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(query, key, value)


def _empty(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates gradients of queries, keys and values, contiguous even if the tensors are not."""
    query, key, value = (
        torch.empty(states.shape, dtype=states.dtype, device=states.device)
        for states in (query, key, value)
    )
    return query, key, value


def _masks(window: int) -> dict[str, Any]:
    if window == _NO_WINDOW:
        return {"causal": True}
    return {"window_size_left": window - 1, "window_size_right": 0}


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, cu_queries, cu_keys, *ctx.numbers = inputs
    ctx.save_for_backward(query, key, value, *output, cu_queries, cu_keys)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = _backward(grad.contiguous(), *ctx.saved_tensors, *ctx.numbers)
    return (*grads, *[None] * 6)


_forward.register_autograd(_differentiate, setup_context=_keep)
FORWARD = _forward._opoverload  # noqa: SLF001 -- torch has no other name for it
"""Operator that selective recomputation recognizes."""
