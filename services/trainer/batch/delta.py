"""Gated delta nets over whole packs, with the kernels of ``flash-linear-attention``.

The kernels compute sequences of any lengths that are laid end to end, so a layer runs once for a pack,
without padding.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from services.trainer.batch.attention import copied_rows
from services.trainer.batch.layout import AttentionLayout, Sequences


@cache
def delta_rule() -> Callable[..., tuple[Tensor, Any]] | None:
    """Returns the chunked gated delta rule for packs; None if its package is not installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None
    rule: Callable[..., tuple[Tensor, Any]] = chunk_gated_delta_rule
    return rule


def computes_packs(states: Tensor) -> bool:
    """Returns True if the kernels can compute these states."""
    return states.is_cuda and delta_rule() is not None


def pack_delta_net(module: nn.Module, states: Tensor, layout: AttentionLayout) -> Tensor:
    """Computes a gated delta net for the tokens of a pack.

    Args:
        module: The layer of a model of Qwen3-Next's or Qwen3.5's form.
        states: ``[T, H]``.
        layout: Layout of the pack.

    Returns:
        ``[T, H]``.
    """
    sequences = layout.sequences()
    if sequences.places is None:
        return _sequences(module, states, sequences)
    return _sequences(module, copied_rows(states, sequences.places), sequences)[sequences.own]


def _sequences(module: Any, states: Tensor, sequences: Sequences) -> Tensor:
    """Computes ``[K, H]`` of sequences that are laid end to end."""
    mixed, z, beta, decay = _projected(module, states)
    mixed = _convolution(mixed)(mixed, module.conv1d.weight[:, 0], sequences.depths)
    sizes = (module.key_dim, module.key_dim, module.value_dim)
    query, key, value = mixed[None].split(sizes, -1)
    rule = delta_rule()
    assert rule is not None
    output, _ = rule(
        query.unflatten(-1, (-1, module.head_k_dim)),
        key.unflatten(-1, (-1, module.head_k_dim)),
        value.unflatten(-1, (-1, module.head_v_dim)),
        g=-module.A_log.float().exp() * functional.softplus(decay.float() + module.dt_bias)[None],
        beta=beta.sigmoid()[None],
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=sequences.cu_lengths,
    )
    width = module.head_v_dim
    output = module.norm(output.reshape(-1, width), z.reshape(-1, width))
    projected: Tensor = module.out_proj(output.reshape(len(states), -1))
    return projected


def _projected(module: Any, states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns ``[K, 2 keys + values]`` queries, keys and values, the output's gate, and two gates by head."""
    if hasattr(module, "in_proj_qkv"):
        return (
            module.in_proj_qkv(states),
            module.in_proj_z(states),
            module.in_proj_b(states),
            module.in_proj_a(states),
        )
    parts = module.fix_query_key_value_ordering(
        module.in_proj_qkvz(states)[None], module.in_proj_ba(states)[None]
    )
    query, key, value, z, beta, decay = (part[0] for part in parts)
    mixed = torch.cat([each.flatten(1) for each in (query, key, value)], -1)
    return mixed, z, beta, decay


def _convolution(values: Tensor) -> Any:
    if not values.is_cuda:
        return _convolved
    # The number of channels is static: a kernel for any number would divide by it for every value.
    torch._dynamo.mark_static(values, 1)  # noqa: SLF001
    return _fused_convolution()


@cache
def _fused_convolution() -> Any:
    return torch.compile(_convolved, dynamic=True)


def _convolved(values: Tensor, weight: Tensor, depths: Tensor) -> Tensor:
    """Returns the activated causal convolution ``[K, C]`` of each channel within each sequence.

    Args:
        values: ``[K, C]``.
        weight: ``[C, 4]``, of the earliest token first.
        depths: ``[K]`` position of each token in its sequence.
    """
    *earlier, last = weight.unbind(1)
    total = values * last
    for distance, tap in enumerate(reversed(earlier), start=1):
        shifted = functional.pad(values, (0, 0, distance, 0))[: len(values)]
        total = total + torch.where((depths >= distance)[:, None], shifted, 0) * tap
    return functional.silu(total)
