"""vLLM's batch-invariant operators in the forward pass of a trainer, with ordinary gradients.

With ``rollout.reproducible: batch_invariant`` the engine vLLM computes products and norms with Triton kernels
whose order of additions does not depend on the number of rows, and attention with FlashAttention 3 without
splits. A model on which :func:`use_vllm_operators` was called has the same forward pass, to the last bit.
Each operator's gradient is that of the same formula in torch.

vLLM is imported on first use: only a trainer of such a run needs it. Its compiled operators read
``VLLM_BATCH_INVARIANT`` from the environment with their first call.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from services.common.models.families import rope_types, windows_of
from services.common.models.invariant import Products

_VERSION: Final = "0.26"
"""Version of vLLM whose operators these are; later ones choose the tiles of a product by its shape."""
_FAMILIES: Final = ("llama", "qwen2", "qwen3")
_ROPES: Final = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that vLLM computes with one kernel and a table of cosines and sines."""
_HEADS: Final = (64, 128)
"""Head sizes for which FlashAttention 3 uses key blocks of one size for paged and contiguous keys."""
MIN_QUERIES: Final = 128
"""If ``max_queries`` is lower, FlashAttention 3 takes larger key blocks for heads of 64 elements."""
_TILE: Final = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8}
"""Tiles of vLLM's matrix product in bfloat16."""
_VOCABULARY_MULTIPLE: Final = 64
"""vLLM pads rows of logits to a multiple of this."""


def missing_operators(config: Mapping[str, Any], dtype: torch.dtype) -> list[str]:
    """Returns why these operators do not compute a model here; empty if they compute it."""
    if (kind := config.get("model_type")) not in _FAMILIES:
        return [f"models of type {kind!r}"]
    head = _head_size(config)
    lacks = {
        f"the dtype {str(dtype).removeprefix('torch.')}": dtype != torch.bfloat16,
        "sliding windows": any(size is not None for size in windows_of(config).values()),
        f"rotary embeddings of type {' and '.join(sorted(rope_types(config)))}": not (
            rope_types(config) <= {*_ROPES}
        ),
        f"the activation {config.get('hidden_act')!r}": config.get("hidden_act") != "silu",
        f"heads of {head} elements": head not in _HEADS,
    }
    reasons = [name for name, is_so in lacks.items() if is_so]
    return reasons if are_here() else [*reasons, f"an environment without vLLM {_VERSION}"]


def are_here() -> bool:
    """Returns True if this environment has the version of vLLM with these operators."""
    try:
        return version("vllm").startswith(f"{_VERSION}.")
    except PackageNotFoundError:
        return False


def use_vllm_operators(model: PreTrainedModel) -> None:
    """Makes a model compute as vLLM does in batch-invariant mode; its attention is set separately.

    Raises:
        ValueError: If the model has a part that the operators do not compute, or this environment lacks them.
    """
    untyped: Any = model
    decoder, config = untyped.get_decoder(), untyped.config
    if reasons := missing_operators(config.to_dict(), torch.bfloat16):
        raise ValueError(
            f"vLLM's batch-invariant operators do not compute {' and '.join(reasons)}; use another model or "
            f"environment, or set rollout.reproducible to true"
        )
    for layer in decoder.layers:
        _replace(layer.self_attn, _attention_forward)
        _replace(layer.mlp, _mlp_forward)
    for module in decoder.modules():
        if type(module) is nn.Linear:
            module.__class__ = _Linear
        elif hasattr(module, "variance_epsilon"):
            _replace(module, _norm_forward)


def products(states: Tensor, weight: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Returns ``[..., N]`` products of ``[..., K]`` bfloat16 states and an ``[N, K]`` weight.

    Args:
        dtype: Dtype of the result; None is that of the arguments.
    """
    rows = states.reshape(-1, states.shape[-1])
    shape = (*states.shape[:-1], len(weight))
    if not len(rows):
        return states.new_zeros(shape, dtype=dtype)
    if dtype is None or dtype == rows.dtype:
        result: Tensor = _vllm().matmul(rows, weight.t())
        return result.view(shape)
    return _stored_products(rows, weight, dtype).view(shape)


def _stored_products(rows: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Runs vLLM's kernel with another dtype of the result than vLLM's own function gives it."""
    from vllm.model_executor.layers.batch_invariant import matmul_kernel_persistent

    output = rows.new_empty((len(rows), len(weight)), dtype=dtype)
    count, width, inner = len(rows), len(weight), rows.shape[1]
    processors = torch.cuda.get_device_properties(rows.device).multi_processor_count
    tiles = -(-count // _TILE["BLOCK_SIZE_M"]) * -(-width // _TILE["BLOCK_SIZE_N"])
    matmul_kernel_persistent[(min(processors, tiles),)](
        rows,
        weight.t(),
        output,
        None,
        count,
        width,
        inner,
        *rows.stride(),
        *weight.t().stride(),
        *output.stride(),
        NUM_SMS=processors,
        A_LARGE=rows.numel() > 2**31,
        B_LARGE=weight.numel() > 2**31,
        C_LARGE=output.numel() > 2**31,
        HAS_BIAS=False,
        **_TILE,
        num_stages=3,
        num_warps=8,
    )
    return output


def float32_products(hidden: Tensor, weight: Tensor) -> Tensor:
    """Returns ``[..., V]`` float32 products of ``[..., H]`` states and a ``[V, H]`` output embedding."""
    return products(hidden, weight, dtype=torch.float32)


def norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Returns the RMS norm of ``[..., H]`` states."""
    result: Tensor = _vllm().norm(states, weight, epsilon)
    return result


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Returns ``silu(gate) * up``."""
    gate_and_up = torch.cat([gate, up], -1)
    output = torch.empty_like(gate)
    _vllm().gated(output, gate_and_up)
    return output


def rotated(
    query: Tensor, key: Tensor, *, positions: Tensor, table: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Rotates ``[T, heads * size]`` queries and ``[T, kv_heads * size]`` keys by their positions.

    Args:
        positions: ``[T]`` int64.
        table: ``[positions, size]`` cosines and sines, in the dtype of the queries.
        size: Number of elements of a head.
    """
    query, key = query.clone(), key.clone()
    _vllm().rotate(positions, query, key, size, table, True)
    return query, key


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_queries: Tensor,
    cu_keys: Tensor,
    max_queries: int,
    max_keys: int,
    scaling: float,
) -> Tensor:
    """Computes causal attention of sequences that lie end to end, each aligned with its keys at their ends.

    Args:
        query: ``[T, heads, D]``.
        key: ``[K, kv_heads, D]``.
        value: ``[K, kv_heads, D]``.
        cu_queries: ``[N + 1]`` int32 offsets of the queries of each sequence, and the total.
        cu_keys: ``[N + 1]`` int32 offsets of the keys of each sequence, and the total.

    Returns:
        ``[T, heads, D]``.
    """
    vllm = _vllm()
    output: Tensor = vllm.attention(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        max_seqlen_q=max(MIN_QUERIES, max_queries),
        cu_seqlens_q=cu_queries,
        max_seqlen_k=max_keys,
        cu_seqlens_k=cu_keys,
        softmax_scale=scaling,
        causal=True,
        num_splits=1,
        fa_version=vllm.attention_version,
    )
    return output


def logprobs(logits: Tensor, targets: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Computes logprobs as vLLM's sampler does.

    Args:
        logits: ``[C, V]`` float32.
        targets: ``[C]`` int64 tokens.
        temperature: Divides the logits.

    Returns:
        The ``[C, V]`` logits over the temperature, and the ``[C]`` float32 logprobs of the targets.
    """
    vllm = _vllm()
    count, size = logits.shape
    width = -(-size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    if temperature != 1.0 or width != size:
        # Triton adds the elements of a row in another order if the row stride is not a multiple of 16.
        logits = logits.new_empty(count, width)[:, :size].copy_(logits)
    if temperature != 1.0:
        rows = torch.zeros(count, dtype=torch.int32, device=logits.device)
        vllm.apply_temperature(logits, rows, torch.full((1,), temperature, device=logits.device))
    values: Tensor = vllm.token_logprobs(logits, targets[:, None])
    return logits, values.squeeze(1)


@dataclass(frozen=True, slots=True)
class _Vllm:
    """vLLM's operators that a trainer calls."""

    matmul: Callable[..., Any]
    norm: Callable[..., Any]
    gated: Callable[..., Any]
    rotate: Callable[..., Any]
    attention: Callable[..., Any]
    attention_version: int
    apply_temperature: Callable[..., Any]
    token_logprobs: Callable[..., Any]


@cache
def _vllm() -> _Vllm:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers import batch_invariant
    from vllm.v1.attention.backends import fa_utils
    from vllm.v1.worker.gpu.sample import gumbel, logprob

    attention_version = fa_utils.get_flash_attn_version()
    if attention_version is None:
        raise ValueError(
            "the trainer cannot compute with vLLM's batch-invariant operators, because vLLM has no "
            "FlashAttention for this device; set rollout.reproducible to true"
        )
    return _Vllm(
        matmul=batch_invariant.matmul_persistent,
        norm=batch_invariant.rms_norm_batch_invariant,
        gated=torch.ops._C.silu_and_mul,  # noqa: SLF001 -- vLLM's compiled operators
        rotate=ops.rotary_embedding,
        attention=fa_utils.flash_attn_varlen_func,
        attention_version=attention_version,
        apply_temperature=gumbel.apply_temperature,
        token_logprobs=logprob.compute_token_logprobs,
    )


class _Computed(torch.autograd.Function):
    """Runs an operator of vLLM; its gradient is that of a formula in torch."""

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[..., Any], formula: Callable[..., Any], *inputs: Tensor
    ) -> Any:
        ctx.formula = formula
        ctx.save_for_backward(*inputs)
        return compute(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        are_needed = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            inputs = [
                leaf.detach().requires_grad_(is_needed)
                for leaf, is_needed in zip(ctx.saved_tensors, are_needed, strict=True)
            ]
            outputs = ctx.formula(*inputs)
        grad_of = iter(
            torch.autograd.grad(outputs, [leaf for leaf in inputs if leaf.requires_grad], grads)
        )
        return None, None, *(next(grad_of) if is_needed else None for is_needed in are_needed)


def computed(compute: Callable[..., Any], formula: Callable[..., Any], *inputs: Tensor) -> Any:
    """Returns ``compute(*inputs)`` with the gradients of ``formula(*inputs)``."""
    return _Computed.apply(compute, formula, *inputs)  # type: ignore[no-untyped-call]


class _Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = Products.apply(products, input, self.weight)  # type: ignore[no-untyped-call]
        # vLLM rounds the products before it adds the bias.
        return result if self.bias is None else result + self.bias


def _replace(module: Any, forward: Callable[..., Any]) -> None:
    module.forward = MethodType(forward, module)


def _norm_forward(self: Any, states: Tensor) -> Tensor:
    epsilon = self.variance_epsilon

    def formula(states: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(states, weight.shape, weight, epsilon)

    result: Tensor = computed(
        partial(norm, epsilon=epsilon), formula, states, self.weight.to(states.dtype)
    )
    return result


def _gated_formula(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def _mlp_forward(self: Any, states: Tensor) -> Tensor:
    output: Tensor = self.down_proj(
        computed(gated, _gated_formula, self.gate_proj(states), self.up_proj(states))
    )
    return output


def _attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    *,
    position_ids: Tensor,
    **options: Any,
) -> tuple[Tensor, None]:
    """Computes an attention layer of transformers, but rotates with vLLM's kernel."""
    shape, size = hidden_states.shape[:-1], self.head_dim
    query, key, value = (
        project(hidden_states).view(*shape, -1, size)
        for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    if hasattr(self, "q_norm"):
        query, key = self.q_norm(query), self.k_norm(key)
    positions = position_ids.reshape(-1)
    table = _rotary_table(self.config, hidden_states.device)

    def compute(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        flat = query.flatten(0, 1).flatten(1), key.flatten(0, 1).flatten(1)
        rotated_heads = rotated(*flat, positions=positions, table=table, size=size)
        return rotated_heads[0].view(query.shape), rotated_heads[1].view(key.shape)

    query, key = computed(compute, partial(_rotation, table[positions]), query, key)
    attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]  # noqa: SLF001 -- as transformers
    output, _ = attend(
        self,
        *(projection.transpose(1, 2) for projection in (query, key, value)),
        attention_mask,
        scaling=self.scaling,
        **options,
    )
    return self.o_proj(output.reshape(*shape, -1)), None


def _rotation(rows: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
    """Rotates ``[1, T, heads, D]`` states by ``[T, D]`` cosines and sines."""
    cosines, sines = (heads[:, None] for heads in rows.chunk(2, -1))
    results = []
    for heads in states:
        first, second = heads.chunk(2, -1)
        results.append(
            torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)
        )
    return tuple(results)


_tables: dict[tuple[object, ...], Tensor] = {}
"""Cosines and sines by the parameters of the rotary embedding and the device."""


def _rotary_table(config: Any, device: torch.device) -> Tensor:
    """Returns the ``[positions, D]`` table of cosines and sines that vLLM computes for a model."""
    size, positions = _head_size(config.to_dict()), config.max_position_embeddings
    parameters = config.rope_parameters
    key = (size, positions, repr(sorted(parameters.items())), device)
    if key not in _tables:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.rotary_embedding import get_rope

        # vLLM computes the table on the GPU; a CPU has other cosines.
        with set_current_vllm_config(VllmConfig()), device:
            rope = get_rope(
                size, max_position=positions, rope_parameters=dict(parameters), dtype=torch.bfloat16
            )
        _tables[key] = rope.cos_sin_cache.to(device=device, dtype=torch.bfloat16)
    return _tables[key]


def _head_size(config: Mapping[str, Any]) -> int:
    return int(
        config.get("head_dim") or config.get("hidden_size", 0) // config["num_attention_heads"]
    )
