"""Advantage estimators: pure functions on flat tokens and per-sequence scores.

A *score* is the sum of a sequence's token rewards. Group estimators turn ``[N]`` scores into ``[N]``
advantages, which all tokens of a sequence share; token estimators work on ``[T]`` rewards. Stale members
count in their group's statistics: staleness masks tokens later.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from services.trainer.batch.segments import Segments

_STD_EPSILON = 1e-6
_WHITEN_EPSILON = 1e-8
_ROUNDING = 64 * torch.finfo(torch.float64).eps
"""Relative size of a difference that counts as rounding."""


def without_rounding(differences: Tensor, scale: Tensor) -> Tensor:
    """Replaces differences of numbers of the size ``scale`` by 0 if they are mere rounding."""
    return torch.where(differences.abs() <= _ROUNDING * scale.abs(), 0.0, differences)


def _group_mean(values: Tensor, groups: Tensor) -> Tensor:
    """Returns the ``[N]`` mean of each member's group. ``groups`` is ``[N]`` int64 from 0."""
    count = _group_size(values, groups)
    return _group_sum(values, groups) / count


def _group_sum(values: Tensor, groups: Tensor) -> Tensor:
    num_groups = int(groups.max()) + 1 if len(groups) else 0
    return values.new_zeros(num_groups).index_add(0, groups, values)[groups]


def _group_size(values: Tensor, groups: Tensor) -> Tensor:
    return _group_sum(torch.ones_like(values), groups)


def _above_lowest(values: Tensor, groups: Tensor) -> Tensor:
    """Subtracts the group's lowest value from ``[N]`` values.

    Means of the result are exact if all of a group are equal: sums of equal numbers may be rounded, but sums
    of zeros are not.
    """
    num_groups = int(groups.max()) + 1 if len(groups) else 0
    lowest = values.new_full((num_groups,), torch.inf)
    return values - lowest.scatter_reduce(0, groups, values, reduce="amin")[groups]


def _centred(values: Tensor, groups: Tensor) -> Tensor:
    """Subtracts the group's mean from ``[N]`` values; exactly 0 if all of a group are equal."""
    above = _above_lowest(values, groups)
    return above - _group_mean(above, groups)


def _group_std(values: Tensor, groups: Tensor) -> Tensor:
    """Returns the ``[N]`` standard deviation of each member's group with ``n - 1``, 0 for a singleton."""
    degrees = (_group_size(values, groups) - 1).clamp(min=1)
    return torch.sqrt(_group_sum(_centred(values, groups).square(), groups) / degrees)


def grpo(scores: Tensor, groups: Tensor, *, divide_by_std: bool = True) -> Tensor:
    """Group-relative advantages (arXiv:2402.03300); without the division Dr.GRPO (arXiv:2503.20783).

    A singleton has no baseline and gets 0, and so does every member of a group of equal scores.

    Args:
        scores: ``[N]`` float.
        groups: ``[N]`` int64, index of each sequence's group.
        divide_by_std: True to divide by the group's standard deviation.

    Returns:
        ``[N]`` advantages.
    """
    centred = _centred(scores, groups)
    if not divide_by_std:
        return centred
    return centred / (_group_std(scores, groups) + _STD_EPSILON)


def rloo(scores: Tensor, groups: Tensor) -> Tensor:
    """Score minus the mean of the other members (arXiv:2402.14740). A singleton gets 0.

    Args:
        scores: ``[N]`` float.
        groups: ``[N]`` int64.

    Returns:
        ``[N]`` advantages.
    """
    size = _group_size(scores, groups)
    return _centred(scores, groups) * size / (size - 1).clamp(min=1)


def maxrl(scores: Tensor, groups: Tensor) -> Tensor:
    """Score minus the group's mean, divided by that mean (MaxRL, arXiv:2602.02710).

    With scores of 0 and 1 this is an unbiased estimate of the gradient of a truncated expansion of the
    log-likelihood of success, which weighs prompts by the inverse of their success rate. A group with a mean
    of 0 or less gets 0.

    Args:
        scores: ``[N]`` float, at least 0.
        groups: ``[N]`` int64.

    Returns:
        ``[N]`` advantages.
    """
    mean = _group_mean(scores, groups)
    return torch.where(mean <= 0, 0.0, _centred(scores, groups) / mean.clamp(min=_STD_EPSILON))


def gdpo(terms: Mapping[str, Tensor], groups: Tensor, *, weights: Mapping[str, float]) -> Tensor:
    """Group-relative advantages of each term, summed with weights and normalized over the batch (GDPO).

    Each term is normalized separately. So its weight in the sum does not depend on its scale, and members
    whose terms differ but have equal sums keep different advantages. Source: arXiv:2601.05242, equations 4
    to 6.

    Args:
        terms: ``[N]`` float scores by term.
        groups: ``[N]`` int64.

    Returns:
        ``[N]`` advantages.
    """
    parts = torch.stack([weight * grpo(terms[name], groups) for name, weight in weights.items()])
    # The mean over the batch is 0, because each group's is; to subtract it would only add its rounding.
    total = without_rounding(parts.sum(0), parts.abs().sum(0))
    deviation = total.square().sum().div(max(len(total) - 1, 1)).sqrt()
    return total / (deviation + _STD_EPSILON)


def opo(scores: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """Score minus the length-weighted mean of the group (arXiv:2505.23585).

    A singleton keeps its score, because the baseline of a group of one is defined as 0.

    Args:
        scores: ``[N]`` float.
        groups: ``[N]`` int64.
        lengths: ``[N]`` sampled tokens of each sequence.

    Returns:
        ``[N]`` advantages.
    """
    weights, above = lengths.to(scores.dtype), _above_lowest(scores, groups)
    total = _group_sum(weights, groups).clamp(min=1)
    centred = above - _group_sum(weights * above, groups) / total
    return torch.where(_group_size(scores, groups) > 1, centred, scores)


def pass_at_k(scores: Tensor, groups: Tensor) -> Tensor:
    """Pass@k advantages: best score minus second best over the deviation, for the best member only.

    Source: arXiv:2503.19595. If several members have the best score, the first one counts as the best
    member, and its advantage is 0.

    Args:
        scores: ``[N]`` float.
        groups: ``[N]`` int64.

    Returns:
        ``[N]`` advantages, nonzero for at most one member of a group.
    """
    result = torch.zeros_like(scores)
    std = _group_std(scores, groups)
    for group in range(int(groups.max()) + 1 if len(groups) else 0):
        members = torch.nonzero(groups == group).squeeze(1)
        if len(members) < 2:
            continue
        best = torch.topk(scores[members], 2)
        winner = members[best.indices[0]]
        result[winner] = (best.values[0] - best.values[1]) / (std[winner] + _STD_EPSILON)
    return result


def returns_to_go(rewards: Tensor, mask: Tensor, segments: Segments, *, gamma: float) -> Tensor:
    """Computes the discounted sum of the rewards from each token on.

    Tokens outside ``mask`` (tool output) are not time steps: the return passes them unchanged.

    Args:
        rewards: ``[T]`` float token rewards.
        mask: ``[T]`` bool, tokens that the policy sampled.
        gamma: Discount per token.

    Returns:
        ``[T]`` returns; at tokens outside ``mask`` the return of the next token inside it.
    """
    returns = torch.zeros_like(rewards)

    def step(tokens: Tensor, state: Tensor) -> Tensor:
        state = torch.where(mask[tokens], rewards[tokens] + gamma * state, state)
        returns[tokens] = state
        return state

    segments.scan_backwards(step, rewards.new_zeros(len(segments)))
    return returns


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    segments: Segments,
    *,
    gamma: float,
    decay: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv:1506.02438), not yet whitened.

    Values and rewards outside ``mask`` have no influence.

    Args:
        rewards: ``[T]`` float token rewards.
        values: ``[T]`` float state values.
        mask: ``[T]`` bool, tokens that the policy sampled.
        gamma: Discount per token.
        decay: Lambda, the decay of the estimate: a number, or ``[N]`` float by sequence.

    Returns:
        ``[T]`` advantages and ``[T]`` returns, 0 outside ``mask``.
    """
    advantages = torch.zeros_like(rewards)
    decays = segments.expand(torch.as_tensor(decay, dtype=rewards.dtype).expand(len(segments)))

    def step(tokens: Tensor, state: Tensor) -> Tensor:
        next_value, next_advantage = state.unbind(1)
        delta = rewards[tokens] + gamma * next_value - values[tokens]
        advantage = delta + gamma * decays[tokens] * next_advantage
        is_response = mask[tokens]
        advantages[tokens] = torch.where(is_response, advantage, 0.0)
        updated = torch.stack([values[tokens], advantage], dim=1)
        return torch.where(is_response[:, None], updated, state)

    segments.scan_backwards(step, rewards.new_zeros(len(segments), 2))
    return advantages, torch.where(mask, advantages + values, 0.0)


def length_adaptive_decay(lengths: Tensor, *, alpha: float) -> Tensor:
    """Returns the lambda ``1 - 1 / (alpha * length)`` of each sequence, at least 0 (VAPO, arXiv:2504.05118).

    Args:
        lengths: ``[N]`` sampled tokens of each sequence.
        alpha: Factor of the length; the paper uses 0.05.

    Returns:
        ``[N]`` float64.
    """
    return (1.0 - 1.0 / (alpha * lengths.to(torch.float64).clamp(min=1.0))).clamp(min=0.0)


def whiten(
    values: Tensor,
    mask: Tensor,
    *,
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda value: value,
) -> Tensor:
    """Normalizes to zero mean and unit variance over all tokens of the batch, 0 outside ``mask``.

    Equal values become exactly 0.

    Args:
        values: ``[T]`` float, this part of the batch.
        mask: ``[T]`` bool.
        sum_over_ranks: Sums a small tensor over all parts; called twice.

    Returns:
        ``[T]`` whitened values.
    """
    masked = torch.where(mask, values, 0.0).to(torch.float64)
    count, total = sum_over_ranks(torch.stack([mask.sum().to(masked.dtype), masked.sum()])).unbind()
    # Center first: as a difference of two large sums, the variance could be mere rounding error.
    mean = total / count.clamp(min=1)
    centred = torch.where(mask, masked - mean, 0.0)
    variance = sum_over_ranks(centred.square().sum()) / (count - 1).clamp(min=1)
    # The mean of equal values may differ from them by its rounding, which that of other values adds to.
    centred = without_rounding(centred, mean.abs() + variance.sqrt())
    return (centred * torch.rsqrt(variance + _WHITEN_EPSILON)).to(values.dtype)


def group_baseline(scores: Tensor, groups: Tensor) -> Tensor:
    """Score minus the group's mean; a singleton keeps its score (REINFORCE++ baseline).

    Source: arXiv:2501.03262. The caller assigns the result to tokens and whitens it.

    Args:
        scores: ``[N]`` float.
        groups: ``[N]`` int64.

    Returns:
        ``[N]`` centered scores.
    """
    several = _group_size(scores, groups) > 1
    return torch.where(several, _centred(scores, groups), scores)


def overlong_penalty(
    lengths: Tensor, *, max_tokens: int, buffer_tokens: int, factor: float
) -> Tensor:
    """DAPO's soft penalty for long responses (arXiv:2503.14476), added to the score.

    Args:
        lengths: ``[N]`` response tokens.
        buffer_tokens: Tokens before the limit over which the penalty grows linearly; above 0.

    Returns:
        ``[N]`` float64 in ``[-factor, 0]``, the same numbers by which dynamic sampling decides.
    """
    over = (lengths - (max_tokens - buffer_tokens)).to(torch.float64)
    return -(over / buffer_tokens).clamp(min=0.0, max=1.0) * factor
