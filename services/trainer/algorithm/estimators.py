"""Advantage estimators by name: each turns the scores of a batch into advantages of one rank's tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from services.common.errors import InvalidArgumentError
from services.trainer.algorithm import advantages
from services.trainer.batch.samples import IncompleteBatchError
from services.trainer.batch.segments import Segments


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoredBatch:
    """Input of an estimator: ``M`` samples of the whole batch, ``T`` tokens of this rank's ``n`` sequences.

    Most samples are one sequence. A sample whose episode had several conversations has several sequences,
    which all get the sample's advantage. A score is a sample's reward, including penalties. Greedy and
    failed samples are not among the ``M``.
    """

    scores: Tensor
    """``[M]`` float64."""
    groups: Tensor
    """``[M]`` int64 from 0, group of each sample: samples of one prompt."""
    lengths: Tensor
    """``[M]`` float64, tokens that the policy sampled."""
    greedy_scores: Tensor
    """``[G]`` float64 by prompt: score of its greedy response, NaN if there is none."""
    prompts: Tensor
    """``[n]`` int64, index of each sequence's prompt among the ``G``."""
    terms: Mapping[str, Tensor]
    """``[M]`` float64 by name: terms of the rewards that all samples have, before weights."""
    places: Tensor
    """``[n]`` int64, index of each sequence's sample among the ``M``; -1 if it is not among them."""
    segments: Segments
    """Sequences of this rank's tokens."""
    rewards: Tensor
    """``[T]`` float64, reward of each token. In each sequence, the last token that the policy sampled has the
    rest of the score.
    """
    mask: Tensor
    """``[T]`` bool, tokens that the policy sampled."""
    trained: Tensor
    """``[T]`` bool, sampled tokens that train."""
    values: Tensor | None
    """``[T]`` float64 values of the critic; None without a critic."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """``[T]`` each, by name: the columns that the advantage declares with :func:`columns.uses_columns`."""
    sum_over_ranks: Callable[[Tensor], Tensor]
    """Sums a small tensor over all ranks, each of which must call it."""

    def expand(self, per_sample: Tensor) -> Tensor:
        """Expands ``[M]`` to ``[T]``: each token gets its sample's value, 0 if its sample is not listed."""
        is_present = self.places >= 0
        local_values = per_sample.new_zeros(len(self.places))
        local_values[is_present] = per_sample[self.places[is_present]]
        return self.segments.expand(local_values)

    def whiten(self, values: Tensor) -> Tensor:
        """Normalizes ``[T]`` to zero mean and unit variance over all trained tokens of the whole batch."""
        return advantages.whiten(values, self.trained, sum_over_ranks=self.sum_over_ranks)


def grpo(batch: ScoredBatch) -> Tensor:
    """Group-relative advantages; see :func:`advantages.grpo`."""
    return batch.expand(advantages.grpo(batch.scores, batch.groups))


def dr_grpo(batch: ScoredBatch) -> Tensor:
    """Like :func:`grpo` without division by the standard deviation (arXiv:2503.20783)."""
    return batch.expand(advantages.grpo(batch.scores, batch.groups, divide_by_std=False))


def rloo(batch: ScoredBatch) -> Tensor:
    """Leave-one-out advantages; see :func:`advantages.rloo`."""
    return batch.expand(advantages.rloo(batch.scores, batch.groups))


def maxrl(batch: ScoredBatch) -> Tensor:
    """Advantages relative to the group's mean; see :func:`advantages.maxrl`."""
    return batch.expand(advantages.maxrl(batch.scores, batch.groups))


def gdpo(batch: ScoredBatch, *, weights: Mapping[str, float]) -> Tensor:
    """Advantages of terms that are normalized one by one; see :func:`advantages.gdpo`.

    Raises:
        InvalidArgumentError: If samples lack a term.
    """
    if missing_terms := sorted(weights.keys() - batch.terms.keys()):
        raise InvalidArgumentError(
            f"algorithm.advantage_arguments.weights has {', '.join(missing_terms)}, but the terms of all "
            f"samples are {', '.join(batch.terms) or 'none'}; use the names that metrics show as reward/NAME",
            missing=", ".join(missing_terms),
        )
    return batch.expand(advantages.gdpo(batch.terms, batch.groups, weights=weights))


def opo(batch: ScoredBatch) -> Tensor:
    """Advantages with the length-weighted baseline; see :func:`advantages.opo`."""
    return batch.expand(advantages.opo(batch.scores, batch.groups, batch.lengths))


def pass_at_k(batch: ScoredBatch) -> Tensor:
    """Pass@k advantages; see :func:`advantages.pass_at_k`."""
    return batch.expand(advantages.pass_at_k(batch.scores, batch.groups))


def none(batch: ScoredBatch) -> Tensor:
    """Zero for every token: only a penalty trains, and rewards are merely measured."""
    return torch.zeros_like(batch.rewards)


def uniform(batch: ScoredBatch) -> Tensor:
    """One for every token, regardless of its score: all demonstrations have the same weight."""
    return torch.ones_like(batch.rewards)


def reinforce_pp_baseline(batch: ScoredBatch) -> Tensor:
    """Score minus the group's mean, whitened over the batch (arXiv:2501.03262)."""
    return batch.whiten(batch.expand(advantages.group_baseline(batch.scores, batch.groups)))


def reinforce_pp(batch: ScoredBatch, *, gamma: float) -> Tensor:
    """Discounted return of each token, whitened over the batch (arXiv:2501.03262)."""
    return batch.whiten(_returns(batch, gamma))


def remax(batch: ScoredBatch, *, gamma: float) -> Tensor:
    """Discounted return minus the score of a greedy response (arXiv:2310.10505).

    Raises:
        IncompleteBatchError: If a prompt has no greedy response.
    """
    if num_lacking := int(batch.greedy_scores.isnan().sum()):
        raise IncompleteBatchError(
            "algorithm.advantage 'remax' needs one greedy response in each group, but "
            f"{num_lacking} groups have none; check the rollouts' logs"
        )
    baseline = batch.segments.expand(batch.greedy_scores[batch.prompts])
    return advantages.without_rounding(_returns(batch, gamma) - baseline, baseline)


def gae(
    batch: ScoredBatch, *, gamma: float, gae_lambda: float, length_adaptive: float | None
) -> tuple[Tensor, Tensor]:
    """Generalized advantages, whitened over the batch, and the critic's targets (arXiv:1506.02438).

    Args:
        gamma: Discount per token.
        gae_lambda: Lambda of the advantages, and of the critic's targets.
        length_adaptive: Alpha of VAPO's lambda by length (arXiv:2504.05118), which then replaces
            ``gae_lambda`` for the advantages only; None uses ``gae_lambda`` for both.

    Returns:
        ``[T]`` advantages and ``[T]`` targets of the critic.
    """
    assert batch.values is not None, "a critic gives values"
    estimate = partial(
        advantages.gae, batch.rewards, batch.values, batch.mask, batch.segments, gamma=gamma
    )
    raw, returns = estimate(decay=gae_lambda)
    if length_adaptive is not None:
        lengths = batch.segments.count(batch.mask)
        raw, _ = estimate(decay=advantages.length_adaptive_decay(lengths, alpha=length_adaptive))
    return batch.whiten(raw), returns


def _returns(batch: ScoredBatch, gamma: float) -> Tensor:
    return advantages.returns_to_go(batch.rewards, batch.mask, batch.segments, gamma=gamma)
