"""Divergence of a policy's next-token distributions from those of a teacher.

A teacher's distribution is one of two columns of response tokens: its ``K`` most likely tokens and all others
together, with their logprobs (``teacher_topk``), or its final hidden states (``teacher_states``), from which
all logits are computed again, chunk by chunk. With ``K`` tokens, the divergence is still one of two whole
distributions, over ``K + 1`` events: never negative, and at most that of the full vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from services.common.models.head import float32_products
from services.common.runspec.formulas import DistillArguments
from services.trainer.algorithm.logprobs import LOWEST, OutputHead, bounded_logits, chunks


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenDivergence:
    """Computes the divergence for a chunk of tokens."""

    arguments: DistillArguments
    """Kind of divergence."""
    temperature: float
    """Divides the teacher's logits, as it divides those of the policy."""
    head: OutputHead | None = None
    """The teacher's output head; None if the teacher's columns are ``teacher_topk``."""

    def __call__(self, logits: Tensor, teacher: Tensor) -> Tensor:
        """Returns the ``[C]`` divergence, differentiable by the logits.

        Args:
            logits: ``[C, V]`` float32, of the policy, over the temperature.
            teacher: ``[C, K + 1, 2]`` as from :func:`most_likely`, or ``[C, H]`` final hidden states.
        """
        if self.head is None:
            student, target = _events(logits, teacher)
        else:
            products = float32_products(teacher.to(self.head.weight), self.head.weight)
            # Heads of one family may be padded to different sizes.
            size = min(logits.shape[1], products.shape[1])
            numbers = self.head.scale, self.head.cap, self.temperature
            target = bounded_logits(products[:, :size], None, numbers)[0].log_softmax(-1)
            student = logits[:, :size].log_softmax(-1)
        return divergence(student, target, kind=self.arguments.divergence, beta=self.arguments.beta)


def divergence(student: Tensor, teacher: Tensor, *, kind: str, beta: float) -> Tensor:
    """Returns the divergence of distributions over the last dimension.

    Args:
        student: ``[C, E]`` logprobs of the policy.
        teacher: ``[C, E]`` logprobs of the teacher.
        kind: ``forward_kl`` (``KL(teacher || policy)``), ``reverse_kl`` (``KL(policy || teacher)``) or
            ``jsd``, the generalized Jensen-Shannon divergence (GKD, arXiv:2306.13649, equation 1)
            ``beta KL(teacher || m) + (1 - beta) KL(policy || m)``, ``m = beta teacher + (1 - beta) policy``.
        beta: Weight of the teacher in ``jsd``.
    """
    if kind == "forward_kl":
        return _kl(teacher, student)
    if kind == "reverse_kl":
        return _kl(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1.0 - beta) * _kl(student, mixture)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def _events(logits: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Returns logprobs ``[C, K + 1]`` of policy and teacher: of the ``K`` tokens, and of all others."""
    size, ids, teacher_logprobs = logits.shape[1], teacher[:, :-1, 0].long(), teacher[..., 1]
    # A token that exists only in the teacher's padded head counts as one of all other tokens.
    is_known = functional.pad(ids < size, (0, 1))
    rest = teacher_logprobs.masked_fill(is_known, LOWEST).logsumexp(-1, keepdim=True)
    teacher_events = torch.cat([teacher_logprobs.masked_fill(~is_known, LOWEST)[:, :-1], rest], 1)
    normalizer = logits.logsumexp(-1, keepdim=True)
    ids = ids.clamp(max=size - 1)
    events = (
        torch.cat([logits.gather(1, ids), _rest(logits, ids, is_known[:, :-1])], 1) - normalizer
    )
    return events.masked_fill(functional.pad(~is_known[:, :-1], (0, 1)), LOWEST), teacher_events


def _rest(logits: Tensor, ids: Tensor, is_known: Tensor) -> Tensor:
    """Returns the ``[C, 1]`` logarithm of the summed exponentials of all but the known tokens."""
    hit = torch.zeros_like(logits).scatter_add_(1, ids, is_known.to(logits.dtype))
    return logits.masked_fill(hit > 0, LOWEST).logsumexp(-1, keepdim=True)


def most_likely(hidden: Tensor, head: OutputHead, count: int, *, temperature: float) -> Tensor:
    """Returns the most likely next tokens, ``[T, K + 1, 2]`` float32: token id and logprob.

    The last entry, with the id -1, has the logprob of all other tokens.

    Args:
        hidden: ``[T, H]`` final hidden states.
        count: Max number of tokens; ``K`` is at most the vocabulary.
    """
    count = min(count, len(head.weight))
    candidates = torch.full((len(hidden), count + 1, 2), -1.0, device=hidden.device)
    for rows in chunks(hidden, head.weight, copies=2):
        products = float32_products(hidden[rows], head.weight)
        logits, _ = bounded_logits(products, None, (head.scale, head.cap, temperature))
        values, ids = logits.topk(count)
        rest = _rest(logits, ids, torch.ones_like(ids, dtype=torch.bool))
        candidates[rows, :-1, 0] = ids.float()
        candidates[rows, :, 1] = torch.cat([values, rest], 1) - logits.logsumexp(-1, keepdim=True)
    return candidates
