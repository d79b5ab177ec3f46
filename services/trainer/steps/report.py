"""Metrics of a step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import torch
from transformers import PretrainedConfig

from services.common.runspec.run import RunSpec
from services.trainer.algorithm import diagnostics
from services.trainer.batch.samples import BatchFacts, Samples
from services.trainer.collectives import MetricTotals, Ranks
from services.trainer.engines.fsdp.compiling import num_compiled
from services.trainer.model.flops import peak_flops, training_flops
from services.trainer.steps.gradients import Early


@dataclass(frozen=True, slots=True)
class Update:
    """Outcome of one optimizer update."""

    loss: float
    grad_norm: float
    learning_rate: float
    applied: bool
    is_empty: bool = False
    critic_applied: bool = True


def describe_updates(updates: Sequence[Update]) -> dict[str, float]:
    """Returns the metrics of a step's updates."""
    unapplied = sum(not update.applied for update in updates)
    nonfinite_losses = sum(not math.isfinite(update.loss) for update in updates)
    return {
        "loss": sum(update.loss for update in updates) / len(updates),
        "grad_norm": max(update.grad_norm for update in updates),
        "learning_rate": updates[-1].learning_rate,
        "nonfinite_updates": float(unapplied),
        "nonfinite_loss": float(nonfinite_losses),
        "nonfinite_grad": float(unapplied - nonfinite_losses),
        "empty_updates": float(sum(update.is_empty for update in updates)),
        "nonfinite_critic": float(sum(not update.critic_applied for update in updates)),
    }


def describe_batch(
    weight_version: int,
    samples: Samples,
    cohort: BatchFacts,
    tally: MetricTotals,
    *,
    max_staleness: int,
) -> None:
    """Adds statistics of a rank's samples to the metrics, before they are trained.

    ``staleness_mean`` and ``staleness_max`` are of the oldest trained token of each sequence, to which the
    staleness bound applies. ``staleness_head`` and the other :func:`~diagnostics.staleness_terms` are of all
    sampled tokens, and ``stale_token_fraction`` is the part of these that is masked for exceeding the bound.

    Args:
        weight_version: Version of the weights that the step starts from.
        samples: This rank's samples.
        cohort: The whole batch. Rewards of failed samples and greedy baselines do not count.
        tally: Receives the terms.
        max_staleness: ``algorithm.max_staleness``.
    """
    everything = torch.ones_like(samples.rewards, dtype=torch.bool)
    first = samples.is_first
    member = cohort.is_member[samples.rows] & first
    tally.mean("reward_mean", samples.rewards, member)
    tally.mean("reward_square", samples.rewards.square(), member)
    tally.mean("scored_fraction", member.float(), first)
    tally.mean("failed_fraction", cohort.is_failed[samples.rows].float(), first)
    counts = samples.by_sample
    tally.mean("sequences_mean", counts.spread(counts.lengths).float(), first)
    segments, mask = samples.segments, samples.tokens["response_mask"]
    tally.mean("response_length_mean", segments.lengths.float(), everything)
    tally.mean("trained_token_fraction", samples.tokens["loss_mask"].float(), mask)
    if "token_versions" in samples.tokens:
        versions, trains = samples.tokens["token_versions"], samples.tokens["loss_mask"]
        per_token, per_sequence = diagnostics.staleness_terms(
            versions, mask, segments, weight_version=weight_version
        )
        has_tokens = segments.count(mask) > 0
        for name, values in per_token.items():
            tally.mean(name, values, mask)
        for name, values in per_sequence.items():
            tally.mean(name, values, has_tokens)
        is_stale = weight_version - versions > max_staleness
        tally.mean("stale_token_fraction", is_stale.float(), mask)
        _, trained = diagnostics.staleness_terms(
            versions, trains, segments, weight_version=weight_version
        )
        is_trained = segments.count(trains) > 0
        tally.mean("staleness_mean", trained["staleness_head"], is_trained)
        tally.max("staleness_max", trained["staleness_head"], is_trained)


def derive(means: Mapping[str, float], spec: RunSpec) -> dict[str, float]:
    """Derives metrics that are not means: standard deviation of rewards and effective sample size.

    Args:
        means: Means over all ranks.
        spec: The run, which may have no rewards.
    """
    metrics = dict(means)
    square = metrics.pop("reward_square")
    if metrics.pop("scored_fraction") > 0 and spec.is_rewarded:
        variance = square - metrics["reward_mean"] ** 2
        metrics["reward_std"] = math.sqrt(max(variance, 0.0))
    else:
        # Failed samples do not have reward 0: their reward is unknown.
        del metrics["reward_mean"], metrics["score_mean"]
    square = metrics.pop("is_weight_square")
    metrics["ess"] = metrics["is_weight_mean"] ** 2 / square if square > 0 else 1.0
    metrics.setdefault("staleness_mean", 0.0)
    return metrics


def utilization(
    early: Early,
    config: PretrainedConfig,
    *,
    active_weights: float,
    ranks: Ranks,
    device: torch.device,
    num_gpus: int,
) -> dict[str, float]:
    """Returns shared prefixes, compilations and, on GPUs, peak memory and MFU. All ranks must call it.

    Args:
        early: Accumulated state of the whole step.
        config: Configuration of the model.
        active_weights: :func:`~services.trainer.model.flops.active_weights` of the model.
        ranks: Data-parallel ranks.
        device: Device of this rank.
        num_gpus: GPUs of all ranks.
    """
    total = ranks.sum(torch.tensor(astuple(early.work), dtype=torch.float64)).tolist()
    sequence_tokens, tokens, squares, predictions = total
    used = {
        "shared_token_fraction": 1.0 - tokens / max(sequence_tokens, 1.0),
        "compilations": float(num_compiled() - early.compiled_before),
    }
    if device.type != "cuda":
        return used
    used["gpu_memory_peak_bytes"] = float(torch.cuda.max_memory_allocated(device))
    peak = peak_flops(device)
    if peak is not None:
        flops = training_flops(
            config, active_weights, tokens=tokens, squares=squares, predictions=predictions
        )
        used["mfu"] = flops / early.seconds / peak / num_gpus
    return used
