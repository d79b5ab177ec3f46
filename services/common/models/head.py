"""The output head of a language model, whose logits are never rounded to the dtype of its weights.

Rounded to bfloat16, logits move a logprob by .02 in the mean (ScaleRL, arXiv:2510.13786; MiniMax-M1,
arXiv:2506.13585), and by another amount in the trainer than in an engine.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel


def float32_products(hidden: Tensor, weight: Tensor) -> Tensor:
    """``[..., V]`` float32 products of ``[..., H]`` hidden states with a ``[V, H]`` output embedding."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        # Sums are kept in float32 by the kernel anyway; here they are also stored so.
        rows = hidden.reshape(-1, hidden.shape[-1])
        products = torch.mm(rows, weight.T, out_dtype=torch.float32)
        return products.view(*hidden.shape[:-1], -1)
    return functional.linear(hidden.float(), weight.float())


def use_float32_head(model: PreTrainedModel) -> None:
    """Let a model's logits be float32; its tensors keep their names, and tied ones stay tied."""
    untyped: Any = model
    untyped.set_output_embeddings(_Float32Head(untyped.get_output_embeddings()))


class _Float32Head(nn.Module):
    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias

    def forward(self, hidden: Tensor) -> Tensor:
        products = float32_products(hidden, self.weight)
        return products if self.bias is None else products + self.bias.float()
