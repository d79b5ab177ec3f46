"""What is reported of a batch besides its loss."""

import math
from collections.abc import Mapping

import torch

from services.trainer.algorithm import diagnostics
from services.trainer.batch.samples import Samples
from services.trainer.ranks.collectives import Tally


def describe_batch(weight_version: int, samples: Samples, tally: Tally) -> None:
    """Count what a rank's samples are like, before they are trained.

    Args:
        weight_version: Number of the weights that the step starts from.
        samples: This rank's samples.
        tally: Receives the terms.
    """
    everything = torch.ones_like(samples.rewards, dtype=torch.bool)
    tally.mean("reward_mean", samples.rewards, everything)
    tally.mean("reward_square", samples.rewards.square(), everything)
    segments, mask = samples.segments, samples.tokens["response_mask"]
    tally.mean("response_length_mean", segments.lengths.float(), everything)
    tally.mean("trained_token_fraction", samples.tokens["loss_mask"].float(), mask)
    if "token_versions" in samples.tokens:
        per_token, per_sequence = diagnostics.staleness_terms(
            samples.tokens["token_versions"], mask, segments, weight_version=weight_version
        )
        has_tokens = segments.count(mask) > 0
        for name, values in per_token.items():
            tally.mean(name, values, mask)
        for name, values in per_sequence.items():
            tally.mean(name, values, has_tokens)
        tally.max("staleness_max", per_sequence["staleness_head"], has_tokens)


def derive(means: Mapping[str, float]) -> dict[str, float]:
    """Add what is no mean itself: standard deviation, effective sample size, mean staleness."""
    metrics = dict(means)
    variance = metrics.pop("reward_square") - metrics["reward_mean"] ** 2
    metrics["reward_std"] = math.sqrt(max(variance, 0.0))
    square = metrics.pop("is_weight_square")
    metrics["ess"] = metrics["is_weight_mean"] ** 2 / square if square > 0 else 1.0
    metrics["staleness_mean"] = metrics.get("staleness_head", 0.0)
    return metrics
