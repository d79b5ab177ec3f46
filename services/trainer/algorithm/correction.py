"""Importance weights and rejection masks for tokens that another policy sampled.

Everything starts from the log-ratio ``proximal_logprobs - rollout_logprobs``. It has two causes, older
weights (staleness) and another implementation (engine versus trainer); the correction does not need to
distinguish them.
"""

import torch
from torch import Tensor

from services.trainer.algorithm.loss import MAX_LOG_RATIO
from services.trainer.batch.segments import Segments


def importance_weights(
    log_ratio: Tensor,
    mask: Tensor,
    segments: Segments,
    *,
    level: str,
    cap: float | None = None,
    floor: float = 0.0,
    cap_mode: str = "truncate",
) -> Tensor:
    """Returns the weight of each token for the gap between the sampling and the proximal policy.

    Sources: decoupled PPO (arXiv:2110.00641) as in AReaL (arXiv:2505.24298); truncation is TIS, the
    mask IcePop. ``sequence`` is unbiased with a high variance; ``geometric`` is for filtering.

    Args:
        log_ratio: ``[T]`` proximal minus rollout logprobs.
        mask: ``[T]`` bool, trained tokens.
        level: ``token``, ``sequence`` (product over the sequence) or ``geometric`` (its geometric mean).
        cap: Max weight; None for no bound.
        cap_mode: ``truncate`` clamps weights to the bounds, ``mask`` sets weights outside them to 0.

    Returns:
        ``[T]`` weights without gradient, 0 outside ``mask``.
    """
    raw = raw_weights(log_ratio, mask, segments, level=level)
    weights = bounded_weights(raw, cap=cap, floor=floor, cap_mode=cap_mode)
    return torch.where(mask, weights, 0.0)


def bounded_weights(ratios: Tensor, *, cap: float | None, floor: float, cap_mode: str) -> Tensor:
    """Returns ratios of probabilities after the bounds of :func:`importance_weights`, in their shape."""
    upper = torch.inf if cap is None else cap
    if cap_mode == "mask":
        return torch.where((ratios >= floor) & (ratios <= upper), ratios, 0.0)
    return ratios.clamp(floor, upper)


def mean_terms(weights: Tensor, mask: Tensor, segments: Segments, *, level: str) -> Tensor:
    """Returns the ``[2]`` sum and number of the weights, by token or by sequence; ranks may add them up."""
    if level == "token":
        return torch.stack([weights.sum(), mask.sum()])
    return torch.stack([segments.mean(weights, mask).sum(), (segments.count(mask) > 0).sum()])


def interpolated_proximal(logprobs: Tensor, rollout_logprobs: Tensor, age: Tensor) -> Tensor:
    """Approximates proximal logprobs without a forward pass (A-3PO, arXiv:2512.06547).

    Interpolates linearly from the sampling policy, ``age`` versions before the start of the step, to the
    current policy, which becomes the version after it. A token of the step's own version keeps its rollout
    logprob.

    Args:
        logprobs: ``[T]``, current policy.
        rollout_logprobs: ``[T]``, policy that sampled the tokens.
        age: ``[T]`` weight versions between the sampling policy and the start of the step.

    Returns:
        ``[T]`` without gradient.
    """
    share = age / (age + 1.0)
    return rollout_logprobs + share * (logprobs.detach() - rollout_logprobs)


def raw_weights(log_ratio: Tensor, mask: Tensor, segments: Segments, *, level: str) -> Tensor:
    """Returns the ``[T]`` ratio of each token, or of its sequence, before any bound; 0 outside ``mask``."""
    log_ratio = torch.where(mask, log_ratio.detach(), 0.0)
    if level == "sequence":
        log_ratio = segments.expand(segments.sum(log_ratio))
    elif level == "geometric":
        log_ratio = segments.expand(segments.mean(log_ratio, mask))
    elif level != "token":
        raise ValueError(f"unknown level {level!r}; expected token, sequence or geometric")
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.where(mask, torch.exp(bounded), 0.0)


def rejection_mask(
    log_ratio: Tensor,
    mask: Tensor,
    segments: Segments,
    *,
    level: str,
    statistic: str,
    lower: float | None = None,
    upper: float | None = None,
) -> Tensor:
    """Returns the tokens whose policies agree well enough to train on.

    Bounds of ``k1`` apply to the ratio itself (0.5 to 2 accepts ratios from 0.5 to 2); those of ``k2``
    and ``k3`` to the divergence.

    Args:
        log_ratio: ``[T]`` proximal minus rollout logprobs.
        mask: ``[T]`` bool, trained tokens.
        level: ``token``, or ``seq_sum``, ``seq_mean``, ``seq_max`` over the sequence.
        statistic: ``k1``, ``k2`` or ``k3``.
        lower: Min accepted value; None for no bound.
        upper: Max accepted value; None for no bound.

    Returns:
        ``[T]`` bool, a subset of ``mask``.
    """
    values = rejection_statistic(log_ratio, mask, segments, level=level, statistic=statistic)
    if statistic == "k1":
        values = torch.exp(values.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    accepted = mask.clone()
    if lower is not None:
        accepted &= values >= lower
    if upper is not None:
        accepted &= values <= upper
    return accepted


def rejection_statistic(
    log_ratio: Tensor, mask: Tensor, segments: Segments, *, level: str, statistic: str
) -> Tensor:
    """Returns the ``[T]`` statistic of each token or of its sequence, 0 outside ``mask``."""
    log_ratio = torch.where(mask, log_ratio.detach(), 0.0)
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match statistic:
        case "k1":
            values = log_ratio
        case "k2":
            values = 0.5 * log_ratio.square()
        case "k3":
            values = torch.exp(log_ratio) - 1.0 - log_ratio
        case _:
            raise ValueError(f"unknown statistic {statistic!r}; expected k1, k2 or k3")
    match level:
        case "token":
            pass
        case "seq_sum":
            values = segments.expand(segments.sum(values))
        case "seq_mean":
            values = segments.expand(segments.mean(values, mask))
        case "seq_max":
            values = segments.expand(segments.max(values, mask))
        case _:
            raise ValueError(f"unknown level {level!r}; expected token or seq_sum|mean|max")
    return torch.where(mask, values, 0.0)
