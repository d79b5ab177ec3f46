"""Policy losses, penalties and their aggregation, as pure functions on flat tokens.

A policy loss maps the tokens of a micro-batch to one loss per token; ``runspec/formulas.py`` names the
losses.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from services.common.runspec.algorithm import AlgorithmSpec, KlSpec
from services.trainer.batch.segments import Segments

_MOST_ERROR = 0.2
_LEAST_FACTOR = 0.5


def adapted_kl(coefficient: float, kl: KlSpec, *, divergence: float, num_samples: int) -> float:
    """Returns the KL coefficient, adapted towards the target divergence (Ziegler et al., arXiv:1909.08593).

    Args:
        divergence: Divergence from the reference in a step; NaN leaves the coefficient unchanged.
    """
    # After a skipped step the divergence may be NaN, and then the coefficient would stay NaN forever.
    if kl.target is None or not math.isfinite(divergence):
        return coefficient
    error = min(max(divergence / kl.target - 1.0, -_MOST_ERROR), _MOST_ERROR)
    # With a horizon of few samples, the formula would make the coefficient negative and so reward divergence
    # from the reference.
    return coefficient * max(1.0 + error * num_samples / kl.horizon, _LEAST_FACTOR)


def adapted_entropy(weight: float, spec: AlgorithmSpec, *, entropy: float) -> tuple[float, float]:
    """Returns the adapted weight of the entropy bonus, and the coefficient of the next step.

    The weight follows the target; the coefficient is the weight while the entropy is at most the target, and
    0 above it (Skywork-OR1, arXiv:2505.22312, section 4.2).

    Args:
        entropy: Entropy of a step in nats; NaN keeps the weight.
    """
    target = spec.entropy_target
    if target is None or not math.isfinite(entropy):
        return weight, weight
    is_low = entropy < target
    weight = max(weight + (spec.entropy_step if is_low else -spec.entropy_step), 0.0)
    return weight, weight if entropy <= target else 0.0


MAX_LOG_RATIO = 20.0
_GSPO_MAX_LOG_RATIO = 10.0
_K3_MAX = 10.0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LossTokens:
    """The ``T`` tokens of a micro-batch, from whole sequences; only ``logprobs`` has a gradient."""

    logprobs: Tensor
    """``[T]`` float32, current policy; 0 outside ``mask``. If a reward model trains, these are its values."""
    old_logprobs: Tensor
    """``[T]`` float32, policy that the ratio refers to: the sampling one (``bypass``) or the proximal one."""
    rollout_logprobs: Tensor
    """``[T]`` float32, policy that sampled the tokens."""
    advantages: Tensor
    """``[T]`` float32."""
    mask: Tensor
    """``[T]`` bool, tokens that train."""
    segments: Segments
    """The ``N`` sequences of the tokens."""
    ref_logprobs: Tensor | None = None
    """``[T]`` float32, reference policy; None if the run has none."""
    divergence: Tensor | None = None
    """``[T]`` float32 with gradient, from the teacher's distributions; None unless the run compares them."""
    groups: Tensor | None = None
    """``[N]`` int64, group of each sequence; None unless a built-in loss compares the members of a group."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """``[T]`` each, by name: the columns that the loss declares with :func:`columns.uses_columns`."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss before aggregation."""

    values: Tensor
    """``[T]`` loss of each token."""
    indicators: dict[str, Tensor] = field(default_factory=dict)
    """``[T]`` indicators by metric name; their means over trained tokens are reported."""
    of_sequences: dict[str, Tensor] = field(default_factory=dict)
    """``[N]`` facts by metric name; their means over sequences with trained tokens are reported."""


def log_ratio_of(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Returns ``logprobs - old_logprobs`` clamped to +-20, in the shape of the inputs."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_of(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Returns ``exp(log_ratio_of(logprobs, old_logprobs))``."""
    return torch.exp(log_ratio_of(logprobs, old_logprobs))


def ppo(
    tokens: LossTokens, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenLoss:
    """Clipped surrogate (arXiv:1707.06347), with clip-higher (DAPO) and dual clip (arXiv:1912.09729).

    Args:
        clip_low: The ratio is clipped at ``1 - clip_low``.
        clip_high: The ratio is clipped at ``1 + clip_high``.
        dual_clip: Bound on the loss of tokens with a negative advantage, in multiples of the advantage; None
            for no bound.

    Returns:
        Token loss with ``clip_fraction`` and, with a dual clip, ``clip_fraction_lower``.
    """
    ratio, advantages = ratio_of(tokens.logprobs, tokens.old_logprobs), tokens.advantages
    clipped = _clipped(ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    if dual_clip is None:
        return clipped
    values, bound, negative = clipped.values, -advantages * dual_clip, advantages < 0
    is_bound = ((values > bound) & negative).to(values.dtype)
    return TokenLoss(
        torch.where(negative, torch.minimum(values, bound), values),
        {**clipped.indicators, "clip_fraction_lower": is_bound},
    )


def _clipped(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> TokenLoss:
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    values = torch.maximum(unclipped, clipped)
    return TokenLoss(values, {"clip_fraction": (clipped > unclipped).to(values.dtype)})


def gspo(tokens: LossTokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """Clipped surrogate with the sequence's geometric mean ratio (arXiv:2507.18071, GSPO-token).

    The ratio is taken over trained tokens; the gradient flows as if each token had the sequence's ratio.

    Args:
        clip_low: Lower clip distance, for example 3e-4.
        clip_high: Upper clip distance, for example 4e-4.

    Returns:
        Token loss with ``clip_fraction``.
    """
    logprobs, segments = tokens.logprobs, tokens.segments
    mean = segments.mean((logprobs - tokens.old_logprobs).detach(), tokens.mask)
    log_ratio = segments.expand(mean) + logprobs - logprobs.detach()
    ratio = torch.exp(log_ratio.clamp(max=_GSPO_MAX_LOG_RATIO))
    return _clipped(ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high)


def cispo(tokens: LossTokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """REINFORCE with a clipped weight, so that every token keeps a gradient (arXiv:2506.13585).

    Args:
        clip_low: The weight is at least ``1 - clip_low``.
        clip_high: The weight is at most ``1 + clip_high``.

    Returns:
        Token loss with ``clip_fraction``.
    """
    ratio = ratio_of(tokens.logprobs.detach(), tokens.old_logprobs)
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    values = -weight * tokens.advantages * tokens.logprobs
    return TokenLoss(values, {"clip_fraction": (weight != ratio).to(values.dtype)})


def aipo(tokens: LossTokens, *, ratio_max: float) -> TokenLoss:
    """REINFORCE weighted by the ratio to the sampling policy, clipped from above (arXiv:2505.24034).

    Args:
        ratio_max: Max weight, for example 2 to 10.

    Returns:
        Token loss with ``clip_fraction``.
    """
    ratio = ratio_of(tokens.logprobs.detach(), tokens.rollout_logprobs)
    values = -ratio.clamp(max=ratio_max) * tokens.advantages * tokens.logprobs
    return TokenLoss(values, {"clip_fraction": (ratio > ratio_max).to(values.dtype)})


def sapo(
    tokens: LossTokens, *, sapo_temperature_positive: float, sapo_temperature_negative: float
) -> TokenLoss:
    """Surrogate with a smooth sigmoid gate in place of the clip (arXiv:2511.20347).

    Args:
        sapo_temperature_positive: Steepness of the gate for positive advantages.
        sapo_temperature_negative: Steepness of the gate for all other advantages.

    Returns:
        Token loss.
    """
    ratio, advantages = ratio_of(tokens.logprobs, tokens.old_logprobs), tokens.advantages
    temperature = torch.full_like(ratio, sapo_temperature_negative)
    temperature = temperature.masked_fill(advantages > 0, sapo_temperature_positive)
    gate = torch.sigmoid(temperature * (ratio - 1.0)) * 4.0 / temperature
    return TokenLoss(-gate * advantages)


def dppo(
    tokens: LossTokens, *, clip_low: float, clip_high: float, divergence: str, ratio_max: float
) -> TokenLoss:
    """Policy gradient that masks tokens outside a trust region (DPPO, arXiv:2602.04879).

    The trust region bounds the divergence between the old and the current policy of the event "this token",
    and not the ratio, which is noisy for unlikely tokens. A token outside it trains only if its gradient
    leads back.

    Args:
        clip_low: Max divergence of a token whose probability falls.
        clip_high: Max divergence of a token whose probability rises.
        divergence: ``tv``, the difference of the two probabilities, or ``kl``, the divergence of the two
            Bernoulli distributions.

    Returns:
        Token loss with ``clip_fraction``, the masked tokens.
    """
    logprobs, old = tokens.logprobs.detach(), tokens.old_logprobs
    probability, old_probability = torch.exp(logprobs), torch.exp(old)
    rises = probability > old_probability
    if divergence == "tv":
        distance = (probability - old_probability).abs()
    else:
        rest, old_rest = (_log_complement(log_probability) for log_probability in (logprobs, old))
        distance = old_probability * (old - logprobs) + (1.0 - old_probability) * (old_rest - rest)
    leaves = torch.where(
        tokens.advantages > 0, rises & (distance > clip_high), ~rises & (distance > clip_low)
    )
    weight = ratio_of(logprobs, old).clamp(max=ratio_max)
    values = torch.where(leaves, 0.0, -weight * tokens.advantages * tokens.logprobs)
    return TokenLoss(values, {"clip_fraction": leaves.to(values.dtype)})


def _log_complement(logprobs: Tensor) -> Tensor:
    """Returns ``log(1 - exp(logprobs))``, at least the logarithm of the smallest step below 1."""
    smallest = torch.finfo(logprobs.dtype).eps
    return torch.log((-torch.expm1(logprobs)).clamp(min=smallest))


def gmpo(tokens: LossTokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """Surrogate with the geometric mean of a sequence's clipped ratios (GMPO, arXiv:2507.20673).

    Each log-ratio is clipped against the sign of its token's advantage before the mean, so that one token
    cannot decide for its sequence.

    Args:
        clip_low: A log-ratio that falls below ``-clip_low`` with a negative advantage is clipped.
        clip_high: A log-ratio that rises above ``clip_high`` with a positive advantage is clipped.

    Returns:
        Token loss with ``clip_fraction``.
    """
    log_ratio = log_ratio_of(tokens.logprobs, tokens.old_logprobs)
    is_clipped = torch.where(
        tokens.advantages > 0, log_ratio > clip_high, log_ratio < -clip_low
    ) & (tokens.advantages != 0)
    bounded = torch.where(is_clipped, log_ratio.clamp(-clip_low, clip_high), log_ratio)
    mean = tokens.segments.mean(bounded, tokens.mask)
    values = -tokens.advantages * tokens.segments.expand(torch.exp(mean))
    return TokenLoss(values, {"clip_fraction": is_clipped.to(values.dtype)})


def vespo(
    tokens: LossTokens,
    *,
    k_positive: float,
    lambda_positive: float,
    k_negative: float,
    lambda_negative: float,
) -> TokenLoss:
    """REINFORCE weighted by a kernel of the sequence's importance weight (VESPO, arXiv:2602.10693).

    The kernel of the weight ``W``, the product of the ratios to the sampling policy, is
    ``W**k * exp(lambda * (1 - W))``: 1 for a weight of 1, and near 0 for small and for large weights.

    Args:
        k_positive: Exponent for advantages that are not negative.
        lambda_positive: Decay for advantages that are not negative.
        k_negative: Exponent for negative advantages.
        lambda_negative: Decay for negative advantages.

    Returns:
        Token loss with ``kernel_mean``, the kernel.
    """
    advantages, segments = tokens.advantages, tokens.segments
    log_ratio = log_ratio_of(tokens.logprobs.detach(), tokens.rollout_logprobs)
    of_sequences = segments.sum(torch.where(tokens.mask, log_ratio, 0.0))
    log_weight = segments.expand(of_sequences.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    negative = advantages < 0
    k = torch.full_like(advantages, k_positive).masked_fill(negative, k_negative)
    decay = torch.full_like(advantages, lambda_positive).masked_fill(negative, lambda_negative)
    kernel = torch.exp(k * log_weight - decay * torch.expm1(log_weight))
    return TokenLoss(-kernel * advantages * tokens.logprobs, {"kernel_mean": kernel})


def m2po(tokens: LossTokens, *, second_moment: float) -> TokenLoss:
    """Policy gradient that bounds the second moment of the log-ratios (M2PO, arXiv:2510.01161, algorithm 1).

    Of the tokens whose gradient leads further away from the old policy, those with the largest squared
    log-ratios are masked, until the mean of the others is at most ``second_moment``. The mean is that of the
    micro-batch.

    Args:
        second_moment: Max mean of the squared log-ratios.

    Returns:
        Token loss with ``clip_fraction``, the masked tokens.
    """
    log_ratio, advantages = log_ratio_of(tokens.logprobs, tokens.old_logprobs), tokens.advantages
    squares = log_ratio.detach().square()
    leaves = tokens.mask & (log_ratio.detach() * advantages > 0)
    ascending, order = torch.where(leaves, squares, torch.inf).sort(stable=True)
    # The mean of the smallest squares grows with their number.
    counts = torch.arange(1, len(squares) + 1, device=squares.device)
    fits = ascending.cumsum(0) <= second_moment * counts
    is_accepted = torch.zeros_like(leaves).scatter(0, order, fits)
    masked = leaves & ~is_accepted
    values = torch.where(masked, 0.0, -advantages * torch.exp(log_ratio))
    return TokenLoss(values, {"clip_fraction": masked.to(values.dtype)})


def clip_cov(
    tokens: LossTokens,
    *,
    clip_low: float,
    clip_high: float,
    fraction: float,
    low: float,
    high: float,
) -> TokenLoss:
    """Clipped surrogate that detaches some tokens that would lower the entropy most (arXiv:2505.22617).

    Entropy falls with the covariance of log-probability and advantage. Of the tokens whose term of it lies
    between ``low`` and ``high``, a random selection gets no gradient. The covariance is that of the
    micro-batch. Equal micro-batches have equal selections.

    Args:
        clip_low: The ratio is clipped at ``1 - clip_low``.
        clip_high: The ratio is clipped at ``1 + clip_high``.
        fraction: Fraction of the trained tokens that are selected.
        low: Min covariance term of a token that may be selected.
        high: Max covariance term of a token that may be selected.

    Returns:
        Token loss with ``clip_fraction`` and ``covariance_fraction``, the selected tokens.
    """
    ratio = ratio_of(tokens.logprobs, tokens.old_logprobs)
    clipped = _clipped(ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high)
    covariance = _covariance(tokens)
    free = tokens.mask & (clipped.indicators["clip_fraction"] == 0)
    candidates = torch.nonzero(free & (covariance > low) & (covariance < high)).squeeze(1)
    count = min(len(candidates), math.ceil(fraction * int(tokens.mask.sum())))
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(0))
    selected = torch.zeros_like(tokens.mask)
    selected[candidates[order[:count].to(candidates.device)]] = True
    values = torch.where(selected, clipped.values.detach(), clipped.values)
    return TokenLoss(
        values, {**clipped.indicators, "covariance_fraction": selected.to(values.dtype)}
    )


def kl_cov(tokens: LossTokens, *, fraction: float, coefficient: float) -> TokenLoss:
    """Policy gradient with a penalty on the tokens that would lower the entropy most (arXiv:2505.22617).

    Args:
        tokens: The micro-batch, whose covariance counts; see :func:`clip_cov`.
        fraction: Fraction of the trained tokens, those with the largest covariance terms, that get the
            penalty; at least one token.
        coefficient: Factor of the penalty, the absolute log-ratio to the old policy.

    Returns:
        Token loss with ``covariance_fraction``, the penalized tokens.
    """
    log_ratio = log_ratio_of(tokens.logprobs, tokens.old_logprobs)
    values = -tokens.advantages * torch.exp(log_ratio)
    num_trained = int(tokens.mask.sum())
    count = min(num_trained, max(1, int(fraction * num_trained)))
    ranked = _covariance(tokens).masked_fill(~tokens.mask, -torch.inf)
    selected = torch.zeros_like(tokens.mask)
    selected[torch.topk(ranked, count).indices] = True
    penalized = values + coefficient * log_ratio.abs()
    return TokenLoss(
        torch.where(selected, penalized, values), {"covariance_fraction": selected.to(values.dtype)}
    )


def _covariance(tokens: LossTokens) -> Tensor:
    """Returns the ``[T]`` terms of the covariance of advantage and logprob over the trained tokens."""
    count = tokens.mask.sum().clamp(min=1)
    centred = (
        column - torch.where(tokens.mask, column, 0.0).sum() / count
        for column in (tokens.advantages, tokens.logprobs.detach())
    )
    return math.prod(centred)  # type: ignore[return-value]


def reinforce(tokens: LossTokens) -> TokenLoss:
    """Plain policy gradient: ``-advantage * logprob``."""
    return TokenLoss(-tokens.advantages * tokens.logprobs)


def distill(tokens: LossTokens, **_: object) -> TokenLoss:
    """Divergence from the teacher's distribution (:mod:`services.trainer.algorithm.divergence`).

    The arguments of the loss are those of the forward pass, which computes it.

    Returns:
        Token loss with ``teacher_divergence``, its value.
    """
    assert tokens.divergence is not None
    return TokenLoss(tokens.divergence, {"teacher_divergence": tokens.divergence.detach()})


def dpo(tokens: LossTokens, *, dpo_beta: float) -> TokenLoss:
    """Direct preference optimization on pairs of answers (arXiv:2305.18290).

    The loss of a pair is ``-log sigmoid(dpo_beta * margin)``. The margin is the log-ratio to the reference
    of the answer with advantage 1 minus that of the answer with advantage -1. Each of the two answers
    carries the loss on its last token, so that the mean over sequences (``seq-mean-token-sum``) is the mean
    over pairs.

    Args:
        tokens: The micro-batch, with reference and groups: a group is a pair.
        dpo_beta: Factor of the log-ratios.

    Returns:
        Token loss with ``preference_accuracy`` (pairs with a margin above 0), ``preference_margin``, and the
        rewards that the policy implies, ``chosen_reward`` and ``rejected_reward``. Margins and rewards are
        multiplied by ``dpo_beta``.
    """
    assert tokens.ref_logprobs is not None
    ratios = torch.where(tokens.mask, tokens.logprobs - tokens.ref_logprobs, 0.0)
    return _preferred(tokens, dpo_beta * tokens.segments.sum(ratios))


def reward_model(tokens: LossTokens, *, center: float) -> TokenLoss:
    """Bradley-Terry loss of a reward model on pairs of answers (arXiv:2203.02155, equation 1).

    The loss of a pair is ``-log sigmoid(chosen - rejected)``. The reward of an answer is the value before its
    last token, which ends the answer: it depends on all other tokens.

    Args:
        tokens: The micro-batch, with groups, and with values in place of logprobs: a group is a pair.
        center: Factor of ``(chosen + rejected)^2``, which keeps rewards around 0 (arXiv:2312.09244).

    Returns:
        Token loss with the same facts as :func:`dpo`.
    """
    is_last = tokens.segments.last(tokens.mask)
    rewards = tokens.segments.sum(torch.where(is_last, tokens.logprobs, 0.0))
    return _preferred(tokens, rewards, center=center)


def _preferred(tokens: LossTokens, rewards: Tensor, *, center: float = 0.0) -> TokenLoss:
    """Returns the negative log-likelihood of the preferences that ``[N]`` rewards imply (Bradley-Terry)."""
    assert tokens.groups is not None
    mask, segments = tokens.mask, tokens.segments
    is_chosen = segments.max(tokens.advantages, mask) > 0
    _, pairs = torch.unique(tokens.groups, return_inverse=True)
    of_pairs = [
        rewards.new_zeros(len(segments)).index_add(0, pairs, torch.where(side, rewards, 0.0))[pairs]
        for side in (is_chosen, ~is_chosen)
    ]
    margins = of_pairs[0] - of_pairs[1]
    of_answers = -logsigmoid(margins) + center * (of_pairs[0] + of_pairs[1]).square()
    losses = torch.where(segments.last(mask), segments.expand(of_answers), 0.0)
    facts = {
        "preference_accuracy": (margins > 0).to(margins.dtype),
        "preference_margin": margins.detach(),
        "chosen_reward": of_pairs[0].detach(),
        "rejected_reward": of_pairs[1].detach(),
    }
    return TokenLoss(losses, of_sequences=facts)


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: str) -> Tensor:
    """Estimates the divergence from the reference policy (Schulman 2020).

    ``k1+`` and ``k3+`` have the value of ``k1`` and ``k3`` but the gradient of ``k2``, which is the
    correct one in expectation for samples of the current policy.

    Args:
        logprobs: ``[T]``, current policy.
        ref_logprobs: ``[T]``, reference policy.
        estimator: ``k1``, ``k2``, ``k3``, ``k1+`` or ``k3+``.

    Returns:
        ``[T]`` penalty. ``k3`` and ``k3+`` are at most 10, which they reach 2.6 nats below the reference;
        further below, ``k3`` has no gradient, and the gradient of ``k3+`` is the distance in nats.
    """
    difference = logprobs - ref_logprobs
    k2 = 0.5 * difference.square()
    if estimator == "k2":
        return k2
    if estimator.startswith("k1"):
        value = difference
    else:
        negative = (-difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        value = (torch.exp(negative) - negative - 1.0).clamp(-_K3_MAX, _K3_MAX)
    if estimator.endswith("+"):
        return value.detach() + k2 - k2.detach()
    return value


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> TokenLoss:
    """Squared error of the critic, with its change from the old values clipped.

    Args:
        values: ``[T]``, current critic.
        old_values: ``[T]``, critic at the start of the step.
        returns: ``[T]`` targets.
        clip: Max change that lowers the loss.

    Returns:
        Token loss with ``value_clip_fraction``.
    """
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    error, clipped_error = (values - returns).square(), (clipped - returns).square()
    indicator = (clipped_error > error).to(values.dtype)
    return TokenLoss(0.5 * torch.maximum(error, clipped_error), {"value_clip_fraction": indicator})


@dataclass(frozen=True, slots=True)
class Denominators:
    """Denominators of token losses: counts over all ranks and micro-batches of one update."""

    tokens: Tensor
    """Scalar, trained tokens."""
    sequences: Tensor
    """Scalar, sequences with at least one trained token."""
    horizon: int
    """Max tokens of a response (``seq-mean-token-sum-norm``)."""


def aggregate(
    token_loss: Tensor, mask: Tensor, segments: Segments, *, mode: str, denominators: Denominators
) -> Tensor:
    """Returns this part's share of the loss; the shares of all parts of an update sum to the loss.

    Args:
        token_loss: ``[T]``.
        mask: ``[T]`` bool, trained tokens.
        segments: Sequences of the tokens; a sequence is never split over parts.
        mode: An aggregation of :class:`~services.common.runspec.algorithm.AlgorithmSpec`.

    Returns:
        Scalar.
    """
    values = torch.where(mask, token_loss, 0.0)
    if mode == "seq-mean-token-mean":
        values = segments.mean(values, mask)
    return values.sum() / divisor(mode, denominators).to(values.dtype)


def divisor(mode: str, denominators: Denominators) -> Tensor:
    """Returns the scalar, at least 1, that an aggregation divides an update's sum by."""
    tokens, sequences = denominators.tokens.clamp(min=1), denominators.sequences.clamp(min=1)
    match mode:
        case "token-sum":
            return torch.ones_like(tokens)
        case "token-mean":
            return tokens
        case "seq-mean-token-sum-norm":
            return sequences * denominators.horizon
        case "seq-mean-token-sum" | "seq-mean-token-mean":
            return sequences
    raise ValueError(f"unknown aggregation {mode!r}")
