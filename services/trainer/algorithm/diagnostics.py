"""Metrics of policy divergence and staleness, as terms whose means are reported.

Each function returns named terms, per token or per sequence, so that a mean over micro-batches and
ranks is exact; other metrics (a ratio of means, a maximum) are derived from reduced values.
"""

import torch
from torch import Tensor

from services.trainer.algorithm.loss import MAX_LOG_RATIO
from services.trainer.batch.segments import Segments


def token_terms(proximal_logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, Tensor]:
    """Returns terms per token of the divergence of the rollout policy from the proximal one.

    Args:
        proximal_logprobs: ``[T]``, policy at the start of the step.
        rollout_logprobs: ``[T]``, policy that sampled the tokens.

    Returns:
        ``[T]`` each: ``kl_rollout_k1``, ``kl_rollout`` (k3), ``chi2_token``, ``prob_diff``,
        ``rollout_logprob_abs_diff``.
    """
    difference = proximal_logprobs - rollout_logprobs
    log_ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = torch.exp(log_ratio)
    return {
        "kl_rollout_k1": -difference,
        "kl_rollout": ratio - 1.0 - log_ratio,
        "chi2_token": ratio.square() - 1.0,
        "prob_diff": (torch.exp(proximal_logprobs) - torch.exp(rollout_logprobs)).abs(),
        "rollout_logprob_abs_diff": difference.abs(),
    }


def sequence_terms(
    proximal_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, segments: Segments
) -> dict[str, Tensor]:
    """Returns terms per sequence of the divergence of the rollout policy from the proximal one.

    Args:
        proximal_logprobs: ``[T]``, policy at the start of the step.
        rollout_logprobs: ``[T]``, policy that sampled the tokens.
        mask: ``[T]`` bool, trained tokens.

    Returns:
        ``[N]`` each: ``proximal_ppl``, ``rollout_ppl``, ``ppl_ratio``, ``log_ppl_diff``,
        ``log_ppl_abs_diff``, ``chi2_seq``.
    """
    proximal = segments.mean(proximal_logprobs, mask)
    rollout = segments.mean(rollout_logprobs, mask)
    difference = torch.where(mask, proximal_logprobs - rollout_logprobs, 0.0)
    log_product = segments.sum(difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "proximal_ppl": torch.exp(-proximal),
        "rollout_ppl": torch.exp(-rollout),
        "ppl_ratio": torch.exp(rollout - proximal),
        "log_ppl_diff": rollout - proximal,
        "log_ppl_abs_diff": (rollout - proximal).abs(),
        "chi2_seq": torch.exp(2.0 * log_product) - 1.0,
    }


def staleness_terms(
    token_versions: Tensor, mask: Tensor, segments: Segments, *, weight_version: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the staleness of tokens and of sequences, in weight versions.

    Args:
        token_versions: ``[T]`` int64, version that sampled each token, -1 for tool tokens.
        mask: ``[T]`` bool, tokens that the policy sampled.
        weight_version: Version of the trainer at the start of the step.

    Returns:
        Terms ``[T]``: ``staleness_token``, ``off_policy_token_fraction``. Terms ``[N]``:
        ``staleness_head`` (oldest token), ``staleness_tail`` (newest), ``span``, ``partial_ratio``
        (1 if a response has several versions).
    """
    age = (weight_version - token_versions).to(torch.float64)
    per_token = {"staleness_token": age, "off_policy_token_fraction": (age > 0).to(age.dtype)}
    has_tokens = segments.count(mask) > 0
    head = torch.where(has_tokens, segments.max(age, mask), 0.0)
    tail = torch.where(has_tokens, -segments.max(-age, mask), 0.0)
    per_sequence = {
        "staleness_head": head,
        "staleness_tail": tail,
        "span": head - tail,
        "partial_ratio": (head > tail).to(age.dtype),
    }
    return per_token, per_sequence
