"""Recurrent layers over packed sequences: each sequence starts from an empty state.

A recurrent layer (a gated delta net with its short convolution, a state-space layer) carries a state from
token to token. Sequences of similar length therefore run as rows of one batch, padded at the end, where
padding cannot reach a token before it. Kernels for rows are transformers' own: ``flash-linear-attention`` if
it is installed and the model is on a GPU, otherwise torch.

A sequence that shares a prefix with others computes the prefix again and returns its own tokens only. No
state has to be forked, and gradients of the prefix add up. Other layers compute shared tokens once.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.common.models.families import recurrent_module
from services.trainer.batch.attention import copied_rows
from services.trainer.batch.context import ContextRanks, all_to_all
from services.trainer.batch.layout import AttentionLayout

_CHUNK = 64
"""Tokens of a chunk of the gated delta rule, unless sequences are shorter."""


def use_packed_recurrence(model: PreTrainedModel) -> None:
    """Makes the recurrent layers of a model accept packs; without a layout they work as before."""
    name = recurrent_module(model.config.to_dict())
    if name is None:
        return
    for module_name, module in model.named_modules():
        if module_name.rpartition(".")[2] == name:
            setattr(module, "forward", partial(_packed, module))  # noqa: B010 -- mypy knows a method


# The number of batches differs from pack to pack, and each number would be another graph.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _packed(
    module: nn.Module,
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
        plain: Tensor = forward(hidden_states, *args, **options)
        return plain
    states = hidden_states[0]
    if context is not None:
        # The state passes through all tokens, so each rank computes the layer for all of them.
        everywhere = all_to_all(
            states.repeat(context.size, 1), [len(states)] * context.size, group=context.group
        )
        states = everywhere[: len(layout.depths)]
    outputs = []
    for batch in layout.batches:
        places = batch.queries if batch.keys is None else batch.keys
        rows = copied_rows(states, places.flatten()).view(*places.shape, -1)
        output = forward(rows, **_chunks(rows))
        if batch.keys is not None:
            output = output.gather(1, batch.depths[:, :, None].expand(-1, -1, output.shape[2]))
        outputs.append(output.flatten(0, 1))
    output = torch.cat(outputs)[layout.gather]
    return (output if context is None else context.own(output))[None]


def _chunks(rows: Tensor) -> dict[str, int]:
    """Returns the option with which torch's gated delta rule does not pad short sequences to 64 tokens."""
    if rows.is_cuda:
        return {}
    return {"chunk_size": min(_CHUNK, 1 << (rows.shape[1] - 1).bit_length())}
