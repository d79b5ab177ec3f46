"""Advantage estimators by name: each turns the scores of a batch into advantages of one rank's tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.algorithm import advantages
from services.trainer.batch.samples import IncompleteBatchError
from services.trainer.batch.segments import Segments


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoredBatch:
    """What an estimator sees: ``M`` samples of the whole batch, ``T`` tokens of this rank's ``n`` sequences.

    Most samples are one sequence. One whose episode had several conversations is several, and all of them get
    what it deserves. A score is a sample's reward, penalties included. Greedy and failed samples are not
    among the ``M``.
    """

    scores: Tensor
    """``[M]`` float64."""
    groups: Tensor
    """``[M]`` int64 from 0, the group of each sample: those of one prompt."""
    lengths: Tensor
    """``[M]`` float64, tokens that the policy sampled."""
    greedy_scores: Tensor
    """``[G]`` float64 by prompt: the score of its greedy response, NaN where there is none."""
    prompts: Tensor
    """``[n]`` int64, which of the ``G`` prompts each sequence of this rank answers."""
    places: Tensor
    """``[n]`` int64, where the sample of each sequence of this rank is among the ``M``; -1 if it is not."""
    segments: Segments
    """Which sequence each token belongs to."""
    rewards: Tensor
    """``[T]`` float64: what each token earned; the rest of the score sits on the last token that the policy
    sampled, in each sequence."""
    mask: Tensor
    """``[T]`` bool, tokens that the policy sampled."""
    trained: Tensor
    """``[T]`` bool, those of them that train."""
    values: Tensor | None
    """``[T]`` float64 of the critic, if there is one."""
    add_up: Callable[[Tensor], Tensor]
    """Sums a small tensor over all ranks, each of which must call it."""

    def spread(self, per_sample: Tensor) -> Tensor:
        """``[M]`` to ``[T]``: each token gets its sample's value, those of others 0."""
        kept = self.places >= 0
        own = per_sample.new_zeros(len(self.places))
        own[kept] = per_sample[self.places[kept]]
        return self.segments.spread(own)

    def whiten(self, values: Tensor) -> Tensor:
        """``[T]`` to ``[T]``: zero mean and unit variance over all trained tokens of the whole batch."""
        return advantages.whiten(values, self.trained, add_up=self.add_up)


def grpo(batch: ScoredBatch) -> Tensor:
    """See :func:`advantages.grpo`."""
    return batch.spread(advantages.grpo(batch.scores, batch.groups))


def dr_grpo(batch: ScoredBatch) -> Tensor:
    """:func:`grpo` without the division (arXiv:2503.20783)."""
    return batch.spread(advantages.grpo(batch.scores, batch.groups, divide_by_std=False))


def rloo(batch: ScoredBatch) -> Tensor:
    """See :func:`advantages.rloo`."""
    return batch.spread(advantages.rloo(batch.scores, batch.groups))


def opo(batch: ScoredBatch) -> Tensor:
    """See :func:`advantages.opo`."""
    return batch.spread(advantages.opo(batch.scores, batch.groups, batch.lengths))


def pass_at_k(batch: ScoredBatch) -> Tensor:
    """See :func:`advantages.pass_at_k`."""
    return batch.spread(advantages.pass_at_k(batch.scores, batch.groups))


def none(batch: ScoredBatch) -> Tensor:
    """0 for every token: a penalty alone trains, and rewards are only measured."""
    return torch.zeros_like(batch.rewards)


def uniform(batch: ScoredBatch) -> Tensor:
    """1 for every token, whatever its score: demonstrations are worth the same."""
    return torch.ones_like(batch.rewards)


def reinforce_pp_baseline(batch: ScoredBatch) -> Tensor:
    """Score minus the group's mean, whitened over the batch (arXiv:2501.03262)."""
    return batch.whiten(batch.spread(advantages.group_baseline(batch.scores, batch.groups)))


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
            f"{num_lacking} groups have none; let the rollouts add it"
        )
    return _returns(batch, gamma) - batch.segments.spread(batch.greedy_scores[batch.prompts])


def gae(batch: ScoredBatch, *, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Generalized advantages, whitened over the batch, and the critic's targets (arXiv:1506.02438)."""
    assert batch.values is not None, "a critic gives values"
    raw, returns = advantages.gae(
        batch.rewards, batch.values, batch.mask, batch.segments, gamma=gamma, decay=gae_lambda
    )
    return batch.whiten(raw), returns


def _returns(batch: ScoredBatch, gamma: float) -> Tensor:
    return advantages.returns_to_go(batch.rewards, batch.mask, batch.segments, gamma=gamma)
