"""Logprobs and entropy of chosen tokens, without ever holding all logits.

Logits exist only for one chunk of tokens at a time: the forward pass computes them, reduces them to three
numbers per token and drops them, and the backward pass computes them again. So memory does not grow with
tokens x vocabulary. On a GPU the two reductions are compiled into one kernel each, because they would
otherwise read and write the chunk a dozen times.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from services.common.memory.trainer import CHUNK_BYTES
from services.common.models import vllm_operators
from services.common.models.head import float32_products
from services.common.models.invariant import float32_invariant_products
from services.common.runspec.engines import InvariantEngine

_EAGER_COPIES = 4
"""Tensors of the size of a chunk's logits that a divergence, or an engine's operators, need besides them."""
LOWEST = -1e30
"""Logit of a token that cannot be drawn: its products with a probability of 0 are 0, unlike those of -inf."""
_TILE = 128
"""Rows that a matrix kernel processes at a time: chunks are multiples of it."""


ChunkDivergence = Callable[[Tensor, Tensor], Tensor]
"""Maps ``[C, V]`` logits over the temperature and distributions of teacher or sampler to a ``[C]`` number."""

_Numbers = tuple[float, float | None, float]
"""Scale and cap of an output head, and the temperature."""


@dataclass(frozen=True, slots=True)
class OutputHead:
    """Maps final hidden states to logits: ``cap * tanh(scale * (hidden @ weight.T) / cap)``."""

    weight: Tensor
    """``[V, H]`` output embedding."""
    scale: float = 1.0
    """Factor of the logits: Granite divides them, Cohere multiplies."""
    cap: float | None = None
    """Bound of the logits (Gemma 2); None for no bound."""
    engine: InvariantEngine | None = None
    """Engine whose operators compute the logprobs, to the last bit; None for the ordinary ones."""


def token_logprobs(
    hidden: Tensor,
    head: OutputHead,
    targets: Tensor,
    *,
    temperature: float,
    mask: Tensor | None = None,
    divergence: "ChunkDivergence | None" = None,
    distributions: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Computes the logprob of each target and the entropy of its distribution, both differentiable.

    Args:
        hidden: ``[T, H]`` final hidden states, of the model's dtype.
        targets: ``[T]`` int64 tokens to score.
        temperature: Divides the logits, as the engine did when it sampled.
        mask: ``[2, S]`` int64 pairs of an index in ``targets``, ascending, and a token that could be drawn:
            probabilities are then relative to these tokens (DeepSeek-V3.2, arXiv:2512.02556). Targets without
            pairs could be any token, as all can with None.
        divergence: Compares the distributions with those of the policy: the divergence from a teacher, or
            the term of score centering.
        distributions: ``[T, ...]`` of the teacher or the sampler; None compares none.

    Returns:
        ``[T]`` float32 logprobs and ``[T]`` float32 entropies in nats; with distributions, also the
        ``[T]`` float32 comparison.
    """
    extra = None if divergence is None or distributions is None else (divergence, distributions)
    result: tuple[Tensor, ...] = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, targets, head, temperature, mask, extra
    )
    return result


def bounded_logits(
    products: Tensor, excluded: Tensor | None, numbers: _Numbers
) -> tuple[Tensor, Tensor | float]:
    """Returns ``[C, V]`` float32 logits over the temperature, and their derivative by the products.

    The logits of excluded tokens are so low that their probability is 0, but finite.
    """
    scale, cap, temperature = numbers
    logits = products.float() * scale
    slope: Tensor | float = scale / temperature
    if cap is None:
        scaled = logits / temperature
    else:
        share = torch.tanh(logits / cap)
        scaled, slope = share * (cap / temperature), (1.0 - share.square()) * slope
    return scaled if excluded is None else scaled.masked_fill(excluded, LOWEST), slope


def _reduce(
    products: Tensor, targets: Tensor, excluded: Tensor | None, numbers: _Numbers
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logprob of the target, log-normalizer and entropy, each ``[C]``."""
    scaled, _ = bounded_logits(products, excluded, numbers)
    normalizer = torch.logsumexp(scaled, -1)
    logprobs = scaled.gather(1, targets[:, None]).squeeze(1) - normalizer
    expected_logits = (torch.exp(scaled - normalizer[:, None]) * scaled).sum(-1)
    return logprobs, normalizer, normalizer - expected_logits


def _reduce_as_torch(
    products: Tensor, targets: Tensor, excluded: Tensor | None, numbers: _Numbers
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes :func:`_reduce` with the operators by which the engine torch computes logprobs."""
    scale, cap, temperature = numbers
    # On a GPU, torch multiplies by the inverse of a number instead of dividing by it; it divides by a tensor.
    divisor = torch.full((1,), temperature, device=products.device)
    scaled, _ = bounded_logits(products, excluded, (scale, cap, 1.0))
    scaled = scaled / divisor
    log_p = torch.log_softmax(scaled, -1)
    logprobs = log_p.gather(1, targets[:, None]).squeeze(1)
    normalizer = scaled.gather(1, targets[:, None]).squeeze(1) - logprobs
    return logprobs, normalizer, -(log_p.exp() * log_p).sum(-1)


def _reduce_as_vllm(
    products: Tensor, targets: Tensor, excluded: Tensor | None, numbers: _Numbers
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes :func:`_reduce` with the operators of vLLM's sampler."""
    _, _, temperature = numbers
    if excluded is not None:
        products = products.masked_fill(excluded, LOWEST)
    scaled, logprobs = vllm_operators.logprobs(products, targets, temperature=temperature)
    normalizer = scaled.gather(1, targets[:, None]).squeeze(1) - logprobs
    log_p = scaled - normalizer[:, None]
    return logprobs, normalizer, -(log_p.exp() * log_p).sum(-1)


_MULTIPLIED: dict[InvariantEngine | None, Callable[[Tensor, Tensor], Tensor]] = {
    None: float32_products,
    "torch": float32_invariant_products,
    "vllm": vllm_operators.float32_products,
}
_REDUCED: dict[InvariantEngine | None, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    "torch": _reduce_as_torch,
    "vllm": _reduce_as_vllm,
}


def _gradient(
    products: Tensor,
    targets: Tensor,
    moments: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor],
    excluded: Tensor | None,
    numbers: _Numbers,
    dtype: torch.dtype,
) -> Tensor:
    """Returns the gradient of ``[C, V]`` products in ``dtype``.

    ``d logprob = onehot - p`` and ``d entropy = -p (log p + entropy)``.
    """
    normalizer, entropy = moments
    grad_logprobs, grad_entropy = grads
    scaled, slope = bounded_logits(products, excluded, numbers)
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
        mask: Tensor | None,
        extra: tuple[ChunkDivergence, Tensor] | None,
    ) -> tuple[Tensor, ...]:
        logprobs = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        normalizer, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        divergence = torch.empty_like(logprobs)
        numbers = head.scale, head.cap, temperature
        is_plain = extra is None and head.engine is None
        for rows in chunks(hidden, weight, copies=1 if is_plain else _EAGER_COPIES):
            products = _MULTIPLIED[head.engine](hidden[rows], weight)
            excluded = _excluded(mask, rows, products)
            reduce = _REDUCED.get(head.engine) or _fused(_reduce, products)
            reduced = reduce(products, targets[rows], excluded, numbers)
            logprobs[rows], normalizer[rows], entropy[rows] = reduced
            if extra is not None:
                compute, teacher = extra
                logits, _ = bounded_logits(products, excluded, numbers)
                divergence[rows] = compute(logits, teacher[rows])
                del logits
            del products, excluded  # else two chunks exist at once
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        ctx.numbers, ctx.mask, ctx.extra = numbers, mask, extra
        return (logprobs, entropy) if extra is None else (logprobs, entropy, divergence)

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor, grad_divergence: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizer, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # Summed over chunks, so it is float32 regardless of the model's dtype. A frozen head has no gradient.
        grad_weight = (
            torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        )
        for rows in chunks(hidden, weight, copies=1 if ctx.extra is None else _EAGER_COPIES):
            products = float32_products(hidden[rows], weight)
            excluded = _excluded(ctx.mask, rows, products)
            grad = _fused(_gradient, products)(
                products,
                targets[rows],
                (normalizer[rows], entropy[rows]),
                (grad_logprobs[rows], grad_entropy[rows]),
                excluded,
                ctx.numbers,
                hidden.dtype,
            )
            if ctx.extra is not None and grad_divergence is not None:
                grad = grad + _divergence_gradient(
                    products, excluded, ctx.numbers, ctx.extra, rows, grad_divergence[rows]
                ).to(grad)
            grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[rows]
            del products, excluded, grad
        of_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, of_weight, *[None] * 5


def _divergence_gradient(
    products: Tensor,
    excluded: Tensor | None,
    numbers: _Numbers,
    extra: tuple[ChunkDivergence, Tensor],
    rows: slice,
    gradient: Tensor,
) -> Tensor:
    """Returns the gradient of a chunk's ``[C, V]`` products from that of its divergence."""
    compute, teacher = extra
    logits, slope = bounded_logits(products, excluded, numbers)
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        (leaf_gradient,) = torch.autograd.grad(compute(leaf, teacher[rows]), leaf, gradient)
    return leaf_gradient * slope


def _excluded(mask: Tensor | None, token_slice: slice, products: Tensor) -> Tensor | None:
    """Returns ``[C, V]`` bool: tokens that could not be drawn, for a chunk; None if all could."""
    if mask is None:
        return None
    bounds = torch.tensor([token_slice.start, token_slice.stop], device=mask.device)
    start, end = torch.searchsorted(mask[0].contiguous(), bounds).tolist()
    rows, tokens = mask[0, start:end] - token_slice.start, mask[1, start:end]
    excluded = torch.zeros(products.shape, dtype=torch.bool, device=products.device)
    excluded[rows] = True
    excluded[rows, tokens] = False
    return excluded


def chunks(hidden: Tensor, weight: Tensor, *, copies: int = 1) -> list[slice]:
    """Returns the chunks of ``[T, H]`` states whose logits exist at once, ``copies`` times."""
    size = max(1, CHUNK_BYTES // (weight.shape[0] * 4 * copies))
    size = size - size % _TILE or size
    return [slice(start, start + size) for start in range(0, hidden.shape[0], size)]
