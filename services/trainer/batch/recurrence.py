"""Recurrent layers over packed sequences: each sequence starts from an empty state.

A recurrent layer (a gated delta net or a Mamba-2 mixer, each with a short convolution) carries a state from
token to token. On a GPU with ``flash-linear-attention``, gated delta nets compute the sequences laid end to
end. Otherwise sequences of similar length run as rows of one batch, padded at the end, where padding cannot
reach a token before it. Kernels for rows are transformers' own: ``mamba-ssm`` if it is installed and the
model is on a GPU, otherwise torch.

A sequence that shares a prefix with others computes the prefix again and returns its own tokens only. No
state has to be forked, and gradients of the prefix add up. Other layers compute shared tokens once.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.common.models.families import recurrent_module
from services.trainer.batch.attention import copied_rows
from services.trainer.batch.context import ContextRanks, all_to_all
from services.trainer.batch.delta import computes_packs, pack_delta_net
from services.trainer.batch.layout import AttentionLayout

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


# The number of batches differs from pack to pack, and each number would be another graph.
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
        module: Recurrent layer.
        prepare: Its preparation.
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
        places = batch.queries if batch.keys is None else batch.keys
        rows = copied_rows(states, places.flatten()).view(*places.shape, -1)
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

    A mixer has its multipliers in a buffer that is not stored. It has no values after the model was on the
    meta device, and with float32 values a pass in bfloat16 would continue in float32.
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
