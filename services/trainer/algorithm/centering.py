"""Score centering: subtracts the sampler's expectation of the score from the score (arXiv:2609.20807).

A sampler ``q`` that differs from the policy ``p`` gives the score ``grad log p`` an expectation that is not
0. Every prefix whose mean advantage is not 0 then moves the policy towards the sampler, or away from it. With
the weight ``w = f(p / q)`` of the off-policy correction, 1 without one, the centered loss of a token ``a`` is

    -advantage * (w_a log p_a - sum_v q_v w_v log p_v)

in which only ``log p`` has a gradient. Rollouts report ``q`` for the ``K`` most likely tokens only, the head.
In the tail, ``q`` is modelled as ``alpha * p``, where ``alpha`` is the ratio of the masses of the two tails.
As the scores of the whole vocabulary cancel under ``p``, the sum over the tail is minus a sum over the head:

    sum_v q_v w_v grad log p_v = sum_head (q_v f(p_v / q_v) - alpha f(1 / alpha) p_v) grad log p_v
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from services.common.runspec.run import RunSpec
from services.trainer.algorithm.correction import bounded_weights
from services.trainer.algorithm.loss import MAX_LOG_RATIO

_LEAST_TAIL: Final = 1e-6
"""Least mass of a tail: float32 does not resolve the rest of a head that has nearly everything."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoreCentering:
    """Computes the centering term of a chunk of tokens."""

    weight: Callable[[Tensor], Tensor] | None
    """Maps ratios ``p / q`` to weights of the correction; None weighs all tokens with 1."""

    def __call__(self, logits: Tensor, sampler: Tensor) -> Tensor:
        """Returns the ``[C]`` sum ``sum_v q_v w_v log p_v``, whose gradient is the expected weighted score.

        Its value has no meaning, because the tail's part of it is replaced.

        Args:
            logits: ``[C, V]`` float32, of the policy, over the temperature.
            sampler: ``[C, K + 1, 2]`` float32 ids and logprobs of the sampler's most likely tokens, with all
                other tokens at the end; ids below 0 are no tokens.
        """
        ids, log_q = sampler[:, :-1, 0].long(), sampler[:, :-1, 1]
        is_token = ids >= 0
        log_p = logits.gather(1, ids.clamp(min=0)) - logits.logsumexp(-1, keepdim=True)
        with torch.no_grad():
            p, q = (torch.where(is_token, values.exp(), 0.0) for values in (log_p, log_q))
            tail_p = (1.0 - p.sum(-1, keepdim=True)).clamp(min=_LEAST_TAIL)
            tail_q = sampler[:, -1:, 1].exp().clamp(min=_LEAST_TAIL)
            alpha = tail_q / tail_p
            ratios = (log_p - log_q).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
            coefficients = q * self._weights(ratios) - alpha * self._weights(1.0 / alpha) * p
        # A token that could not be drawn has coefficient 0, and a logprob that is nearly infinite.
        terms = torch.where(coefficients == 0, 0.0, coefficients * log_p)
        return terms.sum(-1)

    def _weights(self, ratios: Tensor) -> Tensor:
        return torch.ones_like(ratios) if self.weight is None else self.weight(ratios)


def score_centering(spec: RunSpec) -> ScoreCentering | None:
    """Returns the centering of a run, with the weights of its correction; None if it has none."""
    algorithm = spec.algorithm
    if algorithm.score_centering is None:
        return None
    weight = partial(
        bounded_weights,
        cap=algorithm.correction_cap,
        floor=algorithm.correction_floor if algorithm.correction_cap_mode == "mask" else 0.0,
        cap_mode=algorithm.correction_cap_mode,
    )
    return ScoreCentering(weight=weight if spec.correction == "bypass" else None)


def head_mass(sampler: Tensor) -> Tensor:
    """Returns the ``[R]`` probability under the sampler of the tokens that ``[R, K + 1, 2]`` rows list."""
    return 1.0 - sampler[:, -1, 1].exp()
