"""Logprobs and entropy of chosen tokens, without ever holding all logits.

Logits exist only for one chunk of tokens at a time: they are computed in the forward pass, reduced
to three numbers per token, dropped, and computed again in the backward pass. So memory does not grow
with tokens x vocabulary. On a GPU the two reductions are compiled into one kernel each, because they
would otherwise read and write the chunk a dozen times.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_CHUNK_BYTES = 24 * (1 << 30) // 10
"""Most logits at once."""
_TILE = 128
"""Rows that a matrix kernel works on at a time: chunks are multiples of it."""


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


def _reduce(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logprob of the target, log-normalizer and entropy, each ``[C]``, of ``[C, V]`` logits."""
    scaled = logits.float() / temperature
    normalizer = torch.logsumexp(scaled, -1)
    logprobs = scaled.gather(1, targets[:, None]).squeeze(1) - normalizer
    expected = (torch.exp(scaled - normalizer[:, None]) * scaled).sum(-1)
    return logprobs, normalizer, normalizer - expected


def _gradient(
    logits: Tensor,
    targets: Tensor,
    saved: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor],
    temperature: float,
) -> Tensor:
    """Gradient of ``[C, V]`` logits, in their place.

    ``d logprob = onehot - p`` and ``d entropy = -p (log p + entropy)``.
    """
    normalizer, entropy = saved
    grad_logprobs, grad_entropy = grads
    log_p = logits.float() / temperature - normalizer[:, None]
    p = torch.exp(log_p)
    tokens = torch.arange(logits.shape[1], device=logits.device)
    hit = (tokens == targets[:, None]).to(p.dtype)
    grad = (hit - p) * grad_logprobs[:, None]
    grad = grad - p * (log_p + entropy[:, None]) * grad_entropy[:, None]
    return logits.copy_(grad / temperature)


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=True)


def _fused(function: Any, logits: Tensor) -> Any:
    if not logits.is_cuda:
        return function
    # A kernel for any vocabulary divides by its size for every logit.
    torch._dynamo.mark_static(logits, 1)  # noqa: SLF001
    return _compiled(function)


class _ChunkedLogprobs(torch.autograd.Function):
    """Forward in chunks; backward recomputes each chunk's logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        normalizer, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for part in _chunks(hidden, weight):
            logits = functional.linear(hidden[part], weight)
            numbers = _fused(_reduce, logits)(logits, targets[part], temperature)
            logprobs[part], normalizer[part], entropy[part] = numbers
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        ctx.temperature = temperature
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, targets, normalizer, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # Summed over chunks, so it is kept in float32 whatever the model's dtype is.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for part in _chunks(hidden, weight):
            logits = functional.linear(hidden[part], weight)
            grad = _fused(_gradient, logits)(
                logits,
                targets[part],
                (normalizer[part], entropy[part]),
                (grad_logprobs[part], grad_entropy[part]),
                ctx.temperature,
            )
            grad_hidden[part] = grad @ weight
            grad_weight += grad.T @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    size = max(1, _CHUNK_BYTES // (weight.shape[0] * hidden.element_size()))
    size = size - size % _TILE or size
    return [slice(start, start + size) for start in range(0, hidden.shape[0], size)]
