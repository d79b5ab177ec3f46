"""The output head of a language model, whose logits are never rounded to the dtype of its weights.

Rounded to bfloat16, logits move a logprob by .02 in the mean (ScaleRL, arXiv:2510.13786; MiniMax-M1,
arXiv:2506.13585), and by another amount in the trainer than in an engine.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


def float32_products(hidden: Tensor, weight: Tensor) -> Tensor:
    """``[..., V]`` float32 products of ``[..., H]`` hidden states with a ``[V, H]`` output embedding."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        # Sums are kept in float32 by the kernel anyway; here they are also stored so.
        rows = hidden.reshape(-1, hidden.shape[-1])
        products = torch.mm(rows, weight.T, out_dtype=torch.float32)
        return products.view(*hidden.shape[:-1], -1)
    return functional.linear(hidden.float(), weight.float())


class Float32Head(nn.Module):
    """Stands in for a model's output embedding, whose weight it shares and whose bias, if any, it adds."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits, float32."""
        products = float32_products(hidden, self.weight)
        return products if self.bias is None else products + self.bias.float()
