"""Operators whose result for one token does not depend on other tokens, for the engine torch and its trainer.

A kernel adds in an order that it chooses by the shape, so a token may have other bits in another batch
(https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference). Three rules prevent that:

- A matrix product equals the one that is computed in tiles of a fixed number of rows. A larger product is
  used only if it was compared with the tiles: the order depends on the shape and not on the numbers.
- Attention computes each query alone on a CPU; on a GPU, torch's memory-efficient kernel takes the keys in
  blocks of fixed size, in their order. Hidden keys at the end change nothing if their number is a multiple of
  :data:`KEYS`.
- On a CPU, one thread computes, and a pass has a multiple of :func:`token_multiple` tokens: the vectorized
  kernels for exponentials and sines then have no remainder.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedModel

from services.common.models.families import has_plain_scores, is_mixture, recurrent_module
from services.common.models.head import Float32Head

KEYS: Final = 32
"""Attention reads a multiple of this many keys."""
INVARIANT: Final = "slipstream_invariant"
"""Name under which transformers knows the attention of engines."""
_VECTOR = 32
"""Elements that one iteration of a vectorized loop computes on a CPU."""
_TILES: Final = {"cpu": 8, "cuda": 128}
"""Rows of a tile: few on a CPU, where they cost; a GPU needs more to be occupied."""
_MAX_ROWS = 512
"""Rows of the largest product, which bounds the number of shapes to compare."""
_QUERIES = 128
"""Queries of one attention call on a CPU; all of them read the keys up to those of the last query."""
_exact: dict[tuple[object, ...], bool] = {}
"""True for the shapes of products that equal their tiles."""


def use_invariant_operators(model: PreTrainedModel) -> None:
    """Makes the products and norms of a model invariant; its attention is set separately.

    Raises:
        ValueError: If the model has experts, recurrent layers, or capped scores.
    """
    config = model.config.get_text_config().to_dict()
    lacks = {
        "experts": is_mixture(config),
        "recurrent layers": recurrent_module(config) is not None,
        "capped or sink scores": not has_plain_scores(config),
    }
    if missing_operators := [name for name, is_so in lacks.items() if is_so]:
        raise ValueError(
            f"rollout.reproducible is batch_invariant, which the engine torch does not support with "
            f"{' and '.join(missing_operators)}; use vllm or sglang on a GPU, or set "
            "rollout.reproducible to true"
        )
    if model.device.type != "cuda":
        # Several threads would split the elements at any place and compute each remainder by other code.
        torch.set_num_threads(1)
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = _InvariantLinear
        elif isinstance(module, Float32Head):
            module.product = float32_invariant_products
        elif type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            _use_row_norm(module)


def token_multiple(model: PreTrainedModel) -> int:
    """Returns the number of which the tokens of a pass must be a multiple."""
    config = model.config.get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return _VECTOR // math.gcd(_VECTOR, config.intermediate_size, head)


class _InvariantLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        products: Tensor = (
            Products.apply(invariant_products, input, self.weight)  # type: ignore[no-untyped-call]
            if torch.is_grad_enabled()
            else invariant_products(input, self.weight)
        )
        return products if self.bias is None else products + self.bias


class Products(torch.autograd.Function):
    """Products that a given function computes, with ordinary gradients."""

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[[Tensor, Tensor], Tensor], states: Tensor, weight: Tensor
    ) -> Tensor:
        ctx.save_for_backward(states, weight)
        return compute(states, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        states, weight = ctx.saved_tensors
        of_states = grad @ weight if ctx.needs_input_grad[1] else None
        of_weight = None
        if ctx.needs_input_grad[2]:
            of_weight = grad.flatten(0, -2).T @ states.flatten(0, -2)
        return None, of_states, of_weight


def invariant_products(
    states: Tensor, weight: Tensor, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Returns ``[..., N]`` products of ``[..., K]`` states and an ``[N, K]`` weight.

    Args:
        dtype: Dtype of the result, on a GPU; None is that of the arguments.
    """
    rows = states.reshape(-1, states.shape[-1])
    count, tile = len(rows), _TILES[rows.device.type]
    if count % tile:
        rows = functional.pad(rows, (0, 0, 0, -count % tile))
    products_of_chunks = [_product(chunk, weight, tile, dtype) for chunk in rows.split(_MAX_ROWS)]
    products = (
        products_of_chunks[0] if len(products_of_chunks) == 1 else torch.cat(products_of_chunks)
    )
    return products[:count].view(*states.shape[:-1], len(weight))


def float32_invariant_products(hidden: Tensor, weight: Tensor) -> Tensor:
    """Returns ``[..., V]`` float32 products of ``[..., H]`` states and a ``[V, H]`` output embedding."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return invariant_products(hidden, weight, dtype=torch.float32)
    return invariant_products(hidden.float(), weight.float())


def _product(rows: Tensor, weight: Tensor, tile: int, dtype: torch.dtype | None) -> Tensor:
    if len(rows) == tile:
        return _multiply(rows, weight, dtype)
    shape = (rows.device, rows.dtype, dtype, len(rows), *weight.shape)
    if shape not in _exact:
        random_rows = torch.randn(rows.shape, generator=torch.Generator().manual_seed(0)).to(rows)
        whole_product = _multiply(random_rows, weight, dtype)
        if bool(whole_product.any()):  # adapters begin with zeros, which are equal in any order
            _exact[shape] = torch.equal(whole_product, _by_tiles(random_rows, weight, tile, dtype))
    if _exact.get(shape):
        return _multiply(rows, weight, dtype)
    return _by_tiles(rows, weight, tile, dtype)


def _by_tiles(rows: Tensor, weight: Tensor, tile: int, dtype: torch.dtype | None) -> Tensor:
    return torch.cat([_multiply(chunk, weight, dtype) for chunk in rows.split(tile)])


def _multiply(rows: Tensor, weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None:
        return torch.mm(rows, weight.T)
    return torch.mm(rows, weight.T, out_dtype=dtype)


def _use_row_norm(norm: Any) -> None:
    """Computes a norm row by row: on a GPU, the order in which torch's mean adds depends on the rows."""
    plain = norm.forward

    def forward(states: Tensor) -> Tensor:
        if not states.is_cuda:
            result: Tensor = plain(states)
            return result
        weight = norm.weight
        return functional.rms_norm(
            states, weight.shape, weight.to(states.dtype), norm.variance_epsilon
        )

    norm.forward = forward


def invariant_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, *, scaling: float
) -> Tensor:
    """Computes attention of queries that each see some of the keys.

    Args:
        query: ``[B, heads, L, D]``.
        key: ``[B, kv_heads, K, D]``.
        value: ``[B, kv_heads, K, D]``.
        visible: ``[B or 1, 1, L, K]`` bool: keys that each query sees, at least one. The last query that is
            no padding sees the last visible key.

    Returns:
        ``[B, heads, L, D]``.
    """
    if num_padded := -key.shape[2] % KEYS:
        key, value = (functional.pad(states, (0, 0, 0, num_padded)) for states in (key, value))
        visible = functional.pad(visible, (0, num_padded))
    groups = query.shape[1] // key.shape[1]
    if query.is_cuda:
        key, value = (states.repeat_interleave(groups, 1) for states in (key, value))
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask=visible, scale=scaling
            )
    visible = visible.expand(len(query), -1, -1, -1)
    if query.shape[2] == 1:
        return _attend_by_slot(query, key, value, visible, scaling)
    output = torch.empty_like(query)
    for row, (keys, values) in enumerate(zip(key, value, strict=True)):
        keys, values = (states.repeat_interleave(groups, 0) for states in (keys, values))
        for start in range(0, query.shape[2], _QUERIES):
            queries = slice(start, start + _QUERIES)
            visible_keys = visible[row, 0, queries]
            reach = math.ceil((int(visible_keys[-1].nonzero()[-1]) + 1) / KEYS) * KEYS
            output[row, :, queries] = functional.scaled_dot_product_attention(
                query[row, :, queries].transpose(0, 1)[:, :, None],
                keys[:, :reach].expand(len(visible_keys), -1, -1, -1),
                values[:, :reach].expand(len(visible_keys), -1, -1, -1),
                attn_mask=visible_keys[:, None, None, :reach],
                scale=scaling,
            )[:, :, 0].transpose(0, 1)
    return output


def _attend_by_slot(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float
) -> Tensor:
    """Computes one query of each slot without copies of the keys that several heads share."""
    slots, heads, _, size = query.shape
    kv_heads, span = key.shape[1:3]
    groups = heads // kv_heads
    return functional.scaled_dot_product_attention(
        query.reshape(slots * kv_heads, groups, 1, size),
        key.flatten(0, 1)[:, None].expand(-1, groups, -1, -1),
        value.flatten(0, 1)[:, None].expand(-1, groups, -1, -1),
        attn_mask=visible.expand(-1, kv_heads, -1, -1).reshape(-1, 1, 1, span),
        scale=scaling,
    ).view(slots, heads, 1, -1)


def _engine_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Computes the attention of an engine's pass; without a mask each query sees all earlier ones."""
    if attention_mask is None:
        size = query.shape[2]
        attention_mask = torch.ones(1, 1, size, size, dtype=torch.bool, device=query.device).tril()
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = invariant_attention(query, key, value, attention_mask, scaling=scaling)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(INVARIANT, _engine_attention)
