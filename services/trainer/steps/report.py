"""Metrics of a step, and the state that they are accumulated in."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from services.common.runspec.run import RunSpec
from services.common.telemetry.metrics import PhaseTimer
from services.trainer.algorithm import diagnostics
from services.trainer.batch.packing import Work
from services.trainer.batch.samples import BatchFacts, Samples
from services.trainer.batch.step_plan import num_tokens
from services.trainer.collectives import MetricTotals, Ranks
from services.trainer.engines.base import TrainEngine
from services.trainer.model.flops import peak_flops, training_flops
from services.trainer.steps.updates import Outcome


def num_compiled() -> int:
    """Returns the number of graphs that this process has compiled so far."""
    return int(counters["stats"]["unique_graphs"])


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Sequences that a step left out."""

    num_sequences: int = 0
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens left out, by sample key."""

    def __add__(self, other: "LeftOut") -> "LeftOut":
        return LeftOut(self.num_sequences + other.num_sequences, {**self.tokens, **other.tokens})


def left_out_of(
    positions: Collection[int], samples: Samples, facts: BatchFacts, ranks: Ranks
) -> LeftOut:
    """Counts the sequences that all ranks left out. All ranks must call it.

    Args:
        positions: Positions of the sequences that this rank left out.
    """
    counts = torch.zeros(len(facts.keys), 2, dtype=torch.int64)
    for position in positions:
        tokens = num_tokens(samples.select([position]))
        counts[int(samples.rows[position])] += torch.tensor([1, tokens])
    counts = ranks.sum(counts)
    tokens_of = dict(zip(facts.keys, counts[:, 1].tolist(), strict=True))
    return LeftOut(int(counts[:, 0].sum()), {k: count for k, count in tokens_of.items() if count})


@dataclass(slots=True)
class StepAccumulator:
    """Accumulated state of a step: metrics of its groups so far and denominators of their gradients."""

    timer: PhaseTimer = field(default_factory=PhaseTimer)
    tally: MetricTotals = field(default_factory=MetricTotals)
    unit: Tensor | None = None
    """``[2]`` tokens and sequences that the gradients were divided by; None before the first group.

    The counts of the whole update are known only at its end.
    """
    counts: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.int64))
    """``[2]`` tokens and sequences that train, over all ranks."""
    weight: Tensor | float = 0.0
    """Weight of the groups in means over micro-batches, before the gradients are rescaled."""
    loss: Tensor | float = 0.0
    """This rank's share of the loss."""
    sizes: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.int64))
    """``[4]`` samples, tokens, response tokens and trained tokens of this rank."""
    num_samples: int = 0
    """Samples of all ranks."""
    work: Work = field(default_factory=Work)
    """Work of this rank's forward and backward passes."""
    num_packs: int = 0
    """Micro-batches of these passes."""
    left_out: LeftOut = field(default_factory=LeftOut)
    """Sequences that did not fit into memory, on all ranks."""
    num_divided: int = 0
    """Micro-batches that were divided because they did not fit into memory."""
    seconds: float = 0.0
    """Seconds that the groups took."""
    compiled_before: int = field(default_factory=num_compiled)

    def add(self, samples: Samples, facts: BatchFacts, *, seconds: float) -> None:
        """Counts this rank's samples, and those of ``facts`` over all ranks."""
        prompts, responses = samples.prompts.values, samples.responses.values
        trained = int(samples.tokens["loss_mask"].sum())
        self.sizes += torch.tensor(
            [int(samples.is_first.sum()), len(prompts) + len(responses), len(responses), trained]
        )
        self.num_samples += len(facts.lengths)
        self.seconds += seconds


@dataclass(frozen=True, slots=True)
class Update:
    """Outcome of one optimizer update."""

    loss: float
    grad_norm: float
    learning_rate: float
    outcome: Outcome
    is_empty: bool = False
    critic: Outcome = "applied"
    expert_counts: Tensor | None = None
    """``[layers, experts]`` tokens that chose each expert; None for a dense model."""


def describe_updates(updates: Sequence[Update]) -> dict[str, float]:
    outcomes = [update.outcome for update in updates]
    nonfinite = outcomes.count("not_finite")
    nonfinite_losses = sum(not math.isfinite(update.loss) for update in updates)
    return {
        "loss": sum(update.loss for update in updates) / len(updates),
        "grad_norm": max(update.grad_norm for update in updates),
        "learning_rate": updates[-1].learning_rate,
        "nonfinite_updates": float(nonfinite),
        "nonfinite_loss": float(nonfinite_losses),
        "nonfinite_grad": float(nonfinite - nonfinite_losses),
        "empty_updates": float(sum(update.is_empty for update in updates)),
        "nonfinite_critic": float(sum(update.critic == "not_finite" for update in updates)),
        **_expert_load(updates),
    }


def imbalance(counts: Tensor) -> tuple[float, float]:
    """Returns mean and max over layers of the most chosen expert's load, relative to the layer's mean load.

    Args:
        counts: ``[layers, E]``.
    """
    ratios = counts.max(1).values / counts.double().mean(1).clamp(min=1.0)
    return float(ratios.mean()), float(ratios.max())


def _expert_load(updates: Sequence[Update]) -> dict[str, float]:
    counts = [update.expert_counts for update in updates if update.expert_counts is not None]
    if not counts:
        return {}
    mean, worst = imbalance(torch.stack(counts).sum(0))
    return {"expert_load_max": mean, "expert_load_worst": worst}


def describe_batch(
    weight_version: int,
    samples: Samples,
    facts: BatchFacts,
    tally: MetricTotals,
    *,
    max_staleness: int,
) -> None:
    """Adds statistics of a rank's samples to the metrics, before they are trained.

    ``staleness_mean`` and ``staleness_max`` measure the oldest trained token of each sequence, to which the
    staleness bound applies. ``staleness_head`` and the other :func:`~diagnostics.staleness_terms` measure all
    sampled tokens, and ``stale_token_fraction`` is the part of these that is masked for exceeding the bound.

    Args:
        weight_version: Version of the weights that the step starts from.
        facts: The whole batch. Rewards of failed samples and greedy baselines do not count.
    """
    everything = torch.ones_like(samples.rewards, dtype=torch.bool)
    first = samples.is_first
    member = facts.is_member[samples.rows] & first
    tally.mean("reward_mean", samples.rewards, member)
    tally.mean("scored_fraction", member.float(), first)
    tally.mean("failed_fraction", facts.is_failed[samples.rows].float(), first)
    counts = samples.by_sample
    tally.mean("sequences_mean", counts.expand(counts.lengths).float(), first)
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
    """Derives metrics that are ratios of means: the effective sample size; removes unknown rewards.

    Args:
        means: Reduced metrics of all ranks.
        spec: The run, which may have no rewards.
    """
    metrics = dict(means)
    if metrics.pop("scored_fraction") == 0 or not spec.is_rewarded:
        # Failed samples do not have reward 0: their reward is unknown.
        del metrics["reward_mean"], metrics["reward_std"], metrics["score_mean"]
    square = metrics.pop("is_weight_square")
    metrics["ess"] = metrics["is_weight_mean"] ** 2 / square if square > 0 else 1.0
    metrics.setdefault("staleness_mean", 0.0)
    return _by_staleness(metrics)


def _by_staleness(metrics: dict[str, float]) -> dict[str, float]:
    """Replaces mean weights by effective sample sizes; removes the metrics of a staleness without tokens."""
    beginning = "tokens_by_staleness/"
    for age in [name.removeprefix(beginning) for name in metrics if name.startswith(beginning)]:
        mean = metrics.pop(f"is_weight_by_staleness/{age}")
        square = metrics.pop(f"is_weight_square_by_staleness/{age}")
        if metrics[f"{beginning}{age}"] > 0 and square > 0:
            metrics[f"ess_by_staleness/{age}"] = mean**2 / square
        else:
            for name in (beginning, "kl_rollout_by_staleness/", "is_clipped_by_staleness/"):
                del metrics[f"{name}{age}"]
    return metrics


def gpu_memory(device: torch.device) -> dict[str, float]:
    """Returns the peak of a GPU's memory since the last reset of torch's statistics, in bytes.

    Returns:
        ``gpu_memory_peak_bytes`` of tensors; ``gpu_memory_reserved_bytes``, which torch's allocator holds
        for them; ``gpu_memory_driver_bytes``, which all processes use now.
    """
    free, total = torch.cuda.mem_get_info(device)
    return {
        "gpu_memory_peak_bytes": float(torch.cuda.max_memory_allocated(device)),
        "gpu_memory_reserved_bytes": float(torch.cuda.max_memory_reserved(device)),
        "gpu_memory_driver_bytes": float(total - free),
    }


def utilization(early: StepAccumulator, engine: TrainEngine, *, num_gpus: int) -> dict[str, float]:
    """Returns the shared token fraction, the ranks' balance, compilations and, on GPUs, peak memory and MFU.

    All ranks must call it.
    """
    work = torch.tensor(astuple(early.work), dtype=torch.float64)
    sequence_tokens, tokens, squares, predictions = engine.ranks.sum(work).tolist()
    use = {
        "shared_token_fraction": 1.0 - tokens / max(sequence_tokens, 1.0),
        **_balance(early, engine, num_tokens=tokens),
        "compilations": float(num_compiled() - early.compiled_before),
    }
    device = engine.device
    if device.type != "cuda":
        return use
    use |= gpu_memory(device)
    peak = peak_flops(device)
    if peak is not None:
        flops = training_flops(
            engine.model.config,
            engine.model.active_weights,
            tokens=tokens,
            squares=squares,
            predictions=predictions,
        )
        use["mfu"] = flops / early.seconds / peak / num_gpus
    return use


def _balance(early: StepAccumulator, engine: TrainEngine, *, num_tokens: float) -> dict[str, float]:
    """Returns how evenly the ranks' forward passes are loaded, and how full they are.

    ``rank_tokens_ratio`` is the largest number of tokens of a rank relative to the mean: the other ranks wait
    for that one. ``pack_fill`` is the mean number of tokens of a micro-batch relative to
    ``trainer.tokens_per_micro_batch``; a longer single sequence exceeds it.

    Args:
        num_tokens: Tokens that all ranks computed.
    """
    ranks, tokens = engine.ranks, float(early.work.tokens)
    highest, fewest = ranks.max(torch.tensor([tokens, -tokens], dtype=torch.float64)).tolist()
    num_packs = float(ranks.sum(torch.tensor(early.num_packs)))
    capacity = num_packs * engine.bounds.max_tokens
    return {
        "rank_tokens_min": -fewest,
        "rank_tokens_max": highest,
        "rank_tokens_ratio": highest / (num_tokens / ranks.size) if num_tokens else 1.0,
        "pack_fill": num_tokens / capacity if capacity else 0.0,
    }
