"""Logprobs and entropy of chosen tokens, without ever holding all logits.

Logits exist only for one chunk of tokens at a time: they are computed in the forward pass, reduced
to two numbers per token, dropped, and computed again in the backward pass. So memory does not grow
with tokens x vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_CHUNK_ELEMENTS = 1 << 27
"""Most logits at once: 512 MiB in float32."""


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Logprob of each target and entropy of its distribution, both differentiable.

    Args:
        hidden: ``[T, H]`` final hidden states, of the model's dtype.
        weight: ``[V, H]`` output embedding.
        targets: ``[T]`` int64 tokens whose logprobs are wanted.
        temperature: Divides the logits, as the engine did when it sampled.

    Returns:
        ``[T]`` float32 logprobs and ``[T]`` float32 entropies in nats.
    """
    result: tuple[Tensor, Tensor] = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, temperature
    )
    return result


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    size = max(1, _CHUNK_ELEMENTS // weight.shape[0])
    return [slice(start, start + size) for start in range(0, hidden.shape[0], size)]


def _log_softmax(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = functional.linear(hidden, weight).float()
    return functional.log_softmax(logits / temperature, dim=-1)


class _ChunkedLogprobs(torch.autograd.Function):
    """Forward in chunks; backward recomputes each chunk's logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        for part in _chunks(hidden, weight):
            log_p = _log_softmax(hidden[part], weight, temperature)
            logprobs[part] = log_p.gather(1, targets[part, None]).squeeze(1)
            entropy[part] = -(log_p.exp() * log_p).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, entropy)
        ctx.temperature = temperature
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, targets, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # Summed over chunks, so it is kept in float32 whatever the model's dtype is.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for part in _chunks(hidden, weight):
            log_p = _log_softmax(hidden[part], weight, ctx.temperature)
            p = log_p.exp()
            # d logprob = onehot - p;  d entropy = -p (log p + entropy)
            grad = -p * grad_logprobs[part, None]
            grad.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            grad -= p * (log_p + entropy[part, None]) * grad_entropy[part, None]
            grad = (grad / ctx.temperature).to(weight.dtype)
            grad_hidden[part] = grad @ weight
            grad_weight += grad.T @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None
