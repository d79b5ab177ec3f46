"""Recurrent layers over packed sequences: each sequence starts from an empty state.

A recurrent layer (a gated delta net or a Mamba-2 mixer, each with a short convolution) carries a state from
token to token. On a GPU with ``flash-linear-attention``, gated delta nets compute the sequences laid end to
end. Otherwise sequences of similar length run as rows of one batch, padded at the end, where padding cannot
reach a token before it. Kernels for rows are transformers' own: ``mamba-ssm`` if it is installed and the
model is on a GPU, otherwise torch.

A sequence that shares a prefix with others computes the prefix again and returns its own tokens only. No
state has to be forked, and gradients of the prefix add up. Other layers compute shared tokens once.
"""

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from services.common.models.families import recurrent_module
from services.trainer.batch.attention import copied_rows
from services.trainer.batch.context import ContextRanks, all_to_all
from services.trainer.batch.layout import AttentionLayout, Sequences

logger = logging.getLogger(__name__)

_CHUNK = 64
"""Tokens of a chunk of the gated delta rule, unless sequences are shorter."""
_Prepare = Callable[[nn.Module, Tensor], dict[str, int]]
"""Prepares a layer for ``[N, L, H]`` rows and returns options of its forward pass."""


def use_packed_recurrence(model: PreTrainedModel) -> None:
    """Makes the recurrent layers of a model accept packs; without a layout they work as before."""
    name = recurrent_module(model.config.to_dict())
    if name is None:
        return
    is_mixer = model.config.model_type == "falcon_h1"
    prepare = _mixer_preparation(model.config) if is_mixer else _delta_options
    for module_name, module in model.named_modules():
        if module_name.rpartition(".")[2] == name:
            forward = partial(_packed, module, prepare)
            setattr(module, "forward", forward)  # noqa: B010 -- mypy knows a method


# The number of batches differs from pack to pack, and the compiler would make a graph for each number.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _packed(
    module: nn.Module,
    prepare: _Prepare,
    hidden_states: Tensor,
    *args: Any,
    layout: AttentionLayout | None = None,
    context: ContextRanks | None = None,
    **options: Any,
) -> Tensor:
    """Computes ``[1, T, H]`` of a pack.

    Args:
        hidden_states: ``[1, T, H]``.
        *args: Further arguments of the layer's forward pass.
        layout: Layout of the pack; None for a plain batch.
        context: Ranks that compute the pack together; ``T`` is then the number of this rank's tokens.
        **options: Further arguments of the layer's forward pass.
    """
    forward = partial(type(module).forward, module)
    if layout is None:
        prepare(module, hidden_states)
        plain: Tensor = forward(hidden_states, *args, **options)
        return plain
    states = hidden_states[0]
    if context is not None:
        # The state passes through all tokens, so each rank computes the layer for all of them.
        everywhere = all_to_all(
            states.repeat(context.size, 1), [len(states)] * context.size, group=context.group
        )
        states = everywhere[: len(layout.depths)]
    if prepare is _delta_options and computes_packs(states):
        output = pack_delta_net(module, states, layout)
        return (output if context is None else context.own(output))[None]
    outputs = []
    for batch in layout.batches:
        indices = batch.queries if batch.keys is None else batch.keys
        rows = copied_rows(states, indices.flatten()).view(*indices.shape, -1)
        output = forward(rows, **prepare(module, rows))
        if batch.keys is not None:
            output = output.gather(1, batch.depths[:, :, None].expand(-1, -1, output.shape[2]))
        outputs.append(output.flatten(0, 1))
    output = torch.cat(outputs)[layout.gather]
    return (output if context is None else context.own(output))[None]


def _delta_options(_: nn.Module, rows: Tensor) -> dict[str, int]:
    """Returns the option with which torch's gated delta rule does not pad short sequences to 64 tokens."""
    return {} if rows.is_cuda else {"chunk_size": _chunk(_CHUNK, rows)}


def _chunk(size: int, rows: Tensor) -> int:
    return min(size, 1 << (rows.shape[1] - 1).bit_length())


def _mixer_preparation(config: Any) -> _Prepare:
    """Returns the preparation of Falcon-H1's mixers: chunks, and multipliers in the dtype of the pass.

    A mixer has its multipliers in a buffer that is not stored. The buffer has no values after the model was
    on the meta device, and with float32 values a pass in bfloat16 would continue in float32.
    """
    from transformers.models.falcon_h1.modeling_falcon_h1 import compute_mup_vector

    multipliers: Tensor = compute_mup_vector(config)  # type: ignore[no-untyped-call]

    @cache
    def cast(device: torch.device, dtype: torch.dtype) -> Tensor:
        return multipliers.to(device, dtype)

    def prepare(module: nn.Module, rows: Tensor) -> dict[str, int]:
        module.mup_vector = cast(rows.device, rows.dtype)
        if not rows.is_cuda:
            module.chunk_size = _chunk(config.mamba_chunk_size, rows)  # type: ignore[assignment]
        return {}

    return prepare


@cache
def delta_rule() -> Callable[..., tuple[Tensor, Any]] | None:
    """Returns the chunked gated delta rule for packs; None if its package cannot be imported."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        logger.warning(
            "torch computes gated delta nets, several times as slowly as flash-linear-attention; install "
            "slipstream[linear-attention]",
            extra={"error": str(error)},
        )
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

    Returns:
        ``[T, H]``.
    """
    sequences = layout.sequences()
    if sequences.places is None:
        return _sequences(module, states, sequences)
    return _sequences(module, copied_rows(states, sequences.places), sequences)[sequences.positions]


def _sequences(module: Any, states: Tensor, sequences: Sequences) -> Tensor:
    """Computes ``[K, H]`` of sequences that are laid end to end."""
    qkv, z, beta, decay = _projected(module, states)
    qkv = _convolution(qkv)(qkv, module.conv1d.weight[:, 0], sequences.depths)
    sizes = (module.key_dim, module.key_dim, module.value_dim)
    query, key, value = qkv[None].split(sizes, -1)
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
    projections = module.fix_query_key_value_ordering(
        module.in_proj_qkvz(states)[None], module.in_proj_ba(states)[None]
    )
    query, key, value, z, beta, decay = (projection[0] for projection in projections)
    qkv = torch.cat([tensor.flatten(1) for tensor in (query, key, value)], -1)
    return qkv, z, beta, decay


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
