"""Operators whose result for one row does not depend on the other rows of the batch (CPU).

A matrix product adds in an order that its kernel chooses by the shape. Here products have a fixed number of
rows, so that a token has the same bits alone and in any batch
(https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference). Torch's attention of one query
computes each head alone; hidden keys at the end change nothing if their number is a multiple of :data:`KEYS`.
"""

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from services.common.models.families import has_plain_scores, is_mixture, recurrent_module
from services.common.models.head import Float32Head

ROWS: Final = 32
"""Rows of one product. Kernels that compute elements by vectors then never have a rest, for any width."""
KEYS: Final = 64
"""Attention reads a multiple of this many keys."""


def use_invariant_operators(model: PreTrainedModel) -> None:
    """Makes the operators of a model invariant, for inputs of a multiple of :data:`ROWS` rows of one token.

    Raises:
        ValueError: If the model is on a GPU, or has experts, recurrent layers, or capped scores.
    """
    config = model.config.get_text_config().to_dict()
    lacks = {
        "a GPU": model.device.type != "cpu",
        "experts": is_mixture(config),
        "recurrent layers": recurrent_module(config) is not None,
        "capped or sink scores": not has_plain_scores(config),
    }
    if found := [name for name, is_so in lacks.items() if is_so]:
        raise ValueError(
            f"rollout.reproducible is batch_invariant, which the engine torch does not support with "
            f"{' and '.join(found)}; use vllm or sglang on a GPU, or set rollout.reproducible to true"
        )
    # Several threads divide elements anywhere, and compute the rest of each part by other code.
    torch.set_num_threads(1)
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = _InvariantLinear
        elif isinstance(module, Float32Head):
            module.product = tiled_linear


class _InvariantLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        products = tiled_linear(input, self.weight)
        return products if self.bias is None else products + self.bias


def tiled_linear(states: Tensor, weight: Tensor) -> Tensor:
    """Returns ``[..., N]`` products of ``[..., K]`` states and an ``[N, K]`` weight, by tiles of rows."""
    weight = weight.to(states.dtype)
    rows = states.reshape(-1, states.shape[-1])
    count = len(rows)
    if count % ROWS:
        rows = functional.pad(rows, (0, 0, 0, -count % ROWS))
    tiles = rows.view(-1, ROWS, rows.shape[1])
    products = torch.bmm(tiles, weight.T.expand(len(tiles), -1, -1))
    return products.view(-1, len(weight))[:count].view(*states.shape[:-1], len(weight))
