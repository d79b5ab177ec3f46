"""Logprobs and entropy of chosen tokens, without ever holding all logits.

Logits exist only for one chunk of tokens at a time: the forward pass computes them, reduces them to three
numbers per token and drops them, and the backward pass computes them again. So memory does not grow with
tokens x vocabulary. On a GPU the two reductions are compiled into one kernel each, because they would
otherwise read and write the chunk a dozen times.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from services.common.models.head import float32_products

_CHUNK_BYTES = 24 * (1 << 30) // 10
"""Max bytes of logits at once."""
_TILE = 128
"""Rows that a matrix kernel processes at a time: chunks are multiples of it."""


@dataclass(frozen=True, slots=True)
class OutputHead:
    """Maps final hidden states to logits: ``cap * tanh(scale * (hidden @ weight.T) / cap)``."""

    weight: Tensor
    """``[V, H]`` output embedding."""
    scale: float = 1.0
    """Factor of the logits: Granite divides them, Cohere multiplies."""
    cap: float | None = None
    """Bound of the logits (Gemma 2); None for no bound."""


def token_logprobs(
    hidden: Tensor, head: OutputHead, targets: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Computes the logprob of each target and the entropy of its distribution, both differentiable.

    Args:
        hidden: ``[T, H]`` final hidden states, of the model's dtype.
        head: The output head.
        targets: ``[T]`` int64 tokens to score.
        temperature: Divides the logits, as the engine did when it sampled.

    Returns:
        ``[T]`` float32 logprobs and ``[T]`` float32 entropies in nats.
    """
    result: tuple[Tensor, Tensor] = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, targets, head, temperature
    )
    return result


def _bounded(
    products: Tensor, scale: float, cap: float | None, temperature: float
) -> tuple[Tensor, Tensor | float]:
    """Returns ``[C, V]`` float32 logits over the temperature, and their derivative by the products."""
    logits = products.float() * scale
    if cap is None:
        return logits / temperature, scale / temperature
    share = torch.tanh(logits / cap)
    return share * (cap / temperature), (1.0 - share.square()) * (scale / temperature)


def _reduce(
    products: Tensor, targets: Tensor, scale: float, cap: float | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logprob of the target, log-normalizer and entropy, each ``[C]``."""
    scaled, _ = _bounded(products, scale, cap, temperature)
    normalizer = torch.logsumexp(scaled, -1)
    logprobs = scaled.gather(1, targets[:, None]).squeeze(1) - normalizer
    expected = (torch.exp(scaled - normalizer[:, None]) * scaled).sum(-1)
    return logprobs, normalizer, normalizer - expected


def _gradient(
    products: Tensor,
    targets: Tensor,
    saved: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor],
    scale: float,
    cap: float | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Returns the gradient of ``[C, V]`` products in ``dtype``.

    ``d logprob = onehot - p`` and ``d entropy = -p (log p + entropy)``.
    """
    normalizer, entropy = saved
    grad_logprobs, grad_entropy = grads
    scaled, slope = _bounded(products, scale, cap, temperature)
    log_p = scaled - normalizer[:, None]
    p = torch.exp(log_p)
    tokens = torch.arange(products.shape[1], device=products.device)
    hit = (tokens == targets[:, None]).to(p.dtype)
    grad = (hit - p) * grad_logprobs[:, None]
    grad = grad - p * (log_p + entropy[:, None]) * grad_entropy[:, None]
    return (grad * slope).to(dtype)


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=True)


def _fused(function: Any, logits: Tensor) -> Any:
    if not logits.is_cuda:
        return function
    # The vocabulary size is static: a kernel for any size would divide by it for every logit.
    torch._dynamo.mark_static(logits, 1)  # noqa: SLF001
    return _compiled(function)


class _ChunkedLogprobs(torch.autograd.Function):
    """Computes logprobs in chunks; the backward pass recomputes each chunk's logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        head: OutputHead,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        normalizer, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        numbers = head.scale, head.cap, temperature
        for part in _chunks(hidden, weight):
            products = float32_products(hidden[part], weight)
            reduced = _fused(_reduce, products)(products, targets[part], *numbers)
            logprobs[part], normalizer[part], entropy[part] = reduced
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        ctx.numbers = numbers
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden, weight, targets, normalizer, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # Summed over chunks, so it is float32 regardless of the model's dtype. A frozen head has no gradient.
        grad_weight = (
            torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        )
        for part in _chunks(hidden, weight):
            products = float32_products(hidden[part], weight)
            grad = _fused(_gradient, products)(
                products,
                targets[part],
                (normalizer[part], entropy[part]),
                (grad_logprobs[part], grad_entropy[part]),
                *ctx.numbers,
                hidden.dtype,
            )
            grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[part]
        of_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, of_weight, None, None, None


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    size = max(1, _CHUNK_BYTES // (weight.shape[0] * 4))
    size = size - size % _TILE or size
    return [slice(start, start + size) for start in range(0, hidden.shape[0], size)]
