"""Output head of a language model that computes float32 logits, regardless of the dtype of its weights.

Rounding to bfloat16 changes a logprob by .02 on average (ScaleRL, arXiv:2510.13786; MiniMax-M1,
arXiv:2506.13585), and differently in the trainer than in an engine.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel


def float32_products(hidden: Tensor, weight: Tensor) -> Tensor:
    """Returns ``[..., V]`` float32 products of ``[..., H]`` states and a ``[V, H]`` output embedding."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        # The kernel accumulates in float32 anyway; here it also stores float32.
        rows = hidden.reshape(-1, hidden.shape[-1])
        products = torch.mm(rows, weight.T, out_dtype=torch.float32)
        return products.view(*hidden.shape[:-1], -1)
    return functional.linear(hidden.float(), weight.float())


def use_float32_head(model: PreTrainedModel) -> None:
    """Makes a model's logits float32; its tensors keep their names, and tied ones stay tied."""
    untyped: Any = model
    untyped.set_output_embeddings(Float32Head(untyped.get_output_embeddings()))


class Float32Head(nn.Module):
    """Output head with float32 logits.

    Args:
        head: The model's own head, whose tensors it takes.
    """

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias
        self.product: Callable[[Tensor, Tensor], Tensor] = float32_products

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns ``[..., V]`` float32 logits of ``[..., H]`` states."""
        products = self.product(hidden, self.weight)
        return products if self.bias is None else products + self.bias.float()
