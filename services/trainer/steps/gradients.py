"""Gradients of the policy: forward pass, objective and backward pass of each micro-batch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from services.common.callables import bind_callable
from services.common.runspec.algorithm import AlgorithmSpec
from services.common.runspec.run import RunSpec
from services.trainer.algorithm import correction, diagnostics, loss
from services.trainer.algorithm.own import OwnFunction
from services.trainer.batch.packing import Work
from services.trainer.batch.samples import BatchFacts, Samples, idle_samples, pack_samples
from services.trainer.batch.segments import Segments, on_device
from services.trainer.collectives import MetricTotals, Ranks
from services.trainer.engines.fsdp.balancing import Balancer
from services.trainer.engines.fsdp.compiling import num_compiled
from services.trainer.engines.fsdp.oom import LeftOut, Micros, fitting
from services.trainer.engines.fsdp.parallel import begin_micro_batch
from services.trainer.model.policy import Policy
from services.trainer.phases import PhaseTimer

Correction = Literal["bypass", "decoupled", "none"]


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Logprobs and weights that the loss is computed from, all ``[R]`` and without gradient."""

    old: Tensor
    proximal: Tensor
    rollout: Tensor
    weights: Tensor | None
    accepted: Tensor


class Objective:
    """Computes the loss of a micro-batch.

    Args:
        spec: The algorithm.
        correction: Off-policy correction, resolved.
        horizon: Max tokens of a response.

    Raises:
        ValueError: If the loss is a user's function that does not load or rejects its arguments.
    """

    def __init__(self, spec: AlgorithmSpec, *, correction: Correction, horizon: int) -> None:
        self._spec = spec
        self._correction = correction
        self._horizon = horizon
        self._mean_weight = 1.0
        bind = OwnFunction if spec.loss_kind.is_own else bind_callable
        self._loss = bind(spec.loss_kind.function, spec.arguments_of_loss, key="algorithm.loss")
        weighted = {
            "decoupled": {"decoupled"},
            "corrected": {"decoupled", "bypass"},
            "never": set(),
        }
        self._is_weighted = correction in weighted[spec.loss_kind.weighted]
        if spec.loss_kind.is_own:
            self._try()

    def denominators(self, tokens: Tensor, sequences: Tensor) -> loss.Denominators:
        """Returns the denominators of an update from its counts over all ranks."""
        return loss.Denominators(tokens=tokens, sequences=sequences, horizon=self._horizon)

    def look_ahead(self, samples: Samples, ranks: Ranks) -> Samples:
        """Computes what the losses of a batch share, if the algorithm needs it. All ranks must call it.

        This is the mean importance weight, and the mask of accepted tokens.

        Args:
            samples: This rank's part of the whole batch, with proximal logprobs and advantages.
            ranks: Ranks that share the batch.

        Returns:
            The samples, with another :attr:`~Samples.counted` if rejection masks change the denominator.
        """
        if not self._spec.looks_ahead:
            return samples
        self._mean_weight = 1.0
        mask, segments = samples.tokens["loss_mask"], samples.segments
        compared = self._compare(samples.tokens["proximal_logprobs"], samples, segments)
        if self._spec.correction_normalize and compared.weights is not None:
            level = self._spec.correction_level
            terms = correction.mean_terms(compared.weights, mask, segments, level=level)
            total, count = ranks.sum(terms.double()).tolist()
            self._mean_weight = total / count if total > 0 else 1.0
        if self._spec.rejection_denominator == "original":
            return samples
        return samples.with_tokens(counted=compared.accepted)

    def rescaling(self, unit: Tensor, counts: Tensor) -> Tensor:
        """Returns the factor that turns a loss divided by ``unit`` into one divided by ``counts``.

        Both arguments are ``[2]``: tokens and sequences. The factor is a scalar.
        """
        before, now = (
            loss.divisor(self._spec.aggregation, self.denominators(*each.unbind()))
            for each in (unit, counts)
        )
        return before / now

    def __call__(
        self,
        logprobs: Tensor,
        entropy: Tensor,
        samples: Samples,
        *,
        denominators: loss.Denominators,
        kl_coefficient: float,
        tally: MetricTotals,
    ) -> Tensor:
        """Returns this micro-batch's share of the update's loss.

        Args:
            logprobs: ``[R]`` float32, current policy.
            entropy: ``[R]`` float32.
            samples: The micro-batch, with ``advantages`` and ``loss_mask``, on the same device.
            denominators: Counts of the whole update.
            kl_coefficient: Current weight of the KL penalty in the loss.
            tally: Receives the reported terms.

        Returns:
            Scalar with gradient.
        """
        spec, mask = self._spec, samples.tokens["loss_mask"]
        # Masked values may be infinite or NaN, and 0 times a gradient that is not finite is NaN.
        logprobs, entropy = torch.where(mask, logprobs, 0.0), torch.where(mask, entropy, 0.0)
        segments = samples.segments.to(mask.device)
        compared = self._compare(logprobs.detach(), samples, segments)
        policy = self._policy_loss(logprobs, compared, samples, segments)
        values = policy.values
        if self._is_weighted and compared.weights is not None:
            values = values * compared.weights
        values = torch.where(compared.accepted, values, 0.0)
        if kl_coefficient > 0:
            penalty = self._penalty(logprobs, samples, compared)
            values = values + kl_coefficient * penalty
            tally.mean("kl_ref", penalty, mask)
        if spec.entropy_coefficient > 0:
            values = values - spec.entropy_coefficient * entropy
        for name, indicator in policy.indicators.items():
            tally.mean(name, indicator, mask)
        for name, fact in policy.of_sequences.items():
            tally.mean(name, fact, segments.count(mask) > 0)
        self._report(logprobs, entropy, compared, mask, segments, tally)
        return loss.aggregate(
            values, samples.counted, segments, mode=spec.aggregation, denominators=denominators
        )

    def _try(self) -> None:
        """Tests the loss on one trained token, and on one untrained token as on ranks without work.

        Raises:
            ValueError: If the result is not finite or has no gradient.
        """
        idle, one = idle_samples(), torch.ones(1)
        for mask in (torch.tensor([True]), torch.tensor([False])):
            logprobs = torch.tensor([-0.5], requires_grad=True)
            value = self(
                logprobs,
                one,
                idle.with_tokens(loss_mask=mask, advantages=one),
                denominators=self.denominators(one, one),
                kl_coefficient=0.0,
                tally=MetricTotals(),
            )
            if not value.isfinite():
                raise ValueError(
                    f"algorithm.loss {self._spec.loss!r} is {value.item()} for one token with a logprob of "
                    f"-0.5, an old one of 0 and an advantage of 1{'' if mask else ' that does not train'}"
                )
            if mask and not value.requires_grad:
                raise ValueError(
                    f"algorithm.loss {self._spec.loss!r} has no gradient, so nothing would train: its values "
                    "must follow from tokens.logprobs, without detach() and no_grad()"
                )

    def _compare(self, current: Tensor, samples: Samples, segments: Segments) -> _Comparison:
        spec, tokens = self._spec, samples.tokens
        mask = tokens["loss_mask"]
        if "age" in tokens:
            rollout = tokens["rollout_logprobs"]
            proximal = correction.interpolated_proximal(current, rollout, tokens["age"])
        else:
            proximal = tokens.get("proximal_logprobs", current)
            rollout = tokens.get("rollout_logprobs", proximal)
        log_ratio = proximal - rollout
        weights = None
        if self._correction != "none":
            weights = correction.importance_weights(
                # Under bypass there are only two policies: the current one and that of the rollouts.
                current - rollout if self._correction == "bypass" else log_ratio,
                mask,
                segments,
                level=spec.correction_level,
                cap=spec.correction_cap,
                floor=spec.correction_floor if spec.correction_cap_mode == "mask" else 0.0,
                cap_mode=spec.correction_cap_mode,
            )
            weights = weights / self._mean_weight
        accepted = mask
        for rule in spec.rejection:
            kept = correction.rejection_mask(
                log_ratio,
                mask,
                segments,
                level=rule.level,
                statistic=rule.statistic,
                lower=rule.lower,
                upper=rule.upper,
            )
            if rule.negative_only:
                kept = kept | (mask & (tokens["advantages"] >= 0))
            accepted = accepted & kept
        old = rollout if self._correction == "bypass" else proximal
        return _Comparison(old, proximal, rollout, weights, accepted)

    def _policy_loss(
        self, logprobs: Tensor, compared: _Comparison, samples: Samples, segments: Segments
    ) -> loss.TokenLoss:
        result = self._loss(
            loss.LossTokens(
                logprobs=logprobs,
                old_logprobs=compared.old,
                rollout_logprobs=compared.rollout,
                advantages=samples.tokens["advantages"],
                mask=samples.tokens["loss_mask"],
                segments=segments,
                ref_logprobs=samples.tokens.get("ref_logprobs"),
                groups=None
                if samples.groups is None
                else on_device(samples.groups, logprobs.device),
            )
        )
        if not isinstance(result, loss.TokenLoss) or result.values.shape != logprobs.shape:
            raise ValueError(
                f"algorithm.loss {self._spec.loss!r} must return a TokenLoss with one value for each of "
                f"{len(logprobs)} tokens, but returned {result!r}"
            )
        return result

    def _penalty(self, logprobs: Tensor, samples: Samples, compared: _Comparison) -> Tensor:
        """Returns the KL penalty to the reference, importance-weighted unless the run excludes that."""
        penalty = loss.kl_penalty(
            logprobs, samples.tokens["ref_logprobs"], estimator=self._spec.kl.estimator
        )
        if compared.weights is None or not self._spec.kl.importance_weighted:
            return penalty
        return penalty * compared.weights

    def _report(
        self,
        logprobs: Tensor,
        entropy: Tensor,
        compared: _Comparison,
        mask: Tensor,
        segments: Segments,
        tally: MetricTotals,
    ) -> None:
        tally.mean("entropy", entropy, mask)
        tally.mean("ppo_kl", -loss.log_ratio_of(logprobs.detach(), compared.old), mask)
        tally.mean("ratio_mean", loss.ratio_of(logprobs.detach(), compared.old), mask)
        tally.mean("rejected_fraction", (mask & ~compared.accepted).float(), mask)
        terms = diagnostics.token_terms(compared.proximal, compared.rollout)
        for name, values in terms.items():
            tally.mean(name, values, mask)
        tally.max("prob_diff_max", terms["prob_diff"], mask)
        tally.max("rollout_logprob_abs_diff_max", terms["rollout_logprob_abs_diff"], mask)
        has_tokens = segments.count(mask) > 0
        per_sequence = diagnostics.sequence_terms(
            compared.proximal, compared.rollout, mask, segments
        )
        for name, values in per_sequence.items():
            tally.mean(name, values, has_tokens)
        raw = loss.ratio_of(compared.proximal, compared.rollout)
        tally.mean("is_weight_mean", raw, mask)
        tally.mean("is_weight_square", raw.square(), mask)
        tally.max("is_weight_max", raw, mask)
        tally.mean("is_clipped_fraction", (raw > self._spec.correction_cap).float(), mask)


OnTrained = Callable[[Samples, Tensor], None]
"""Called with each trained micro-batch and its logprobs ``[R]``, computed before the update."""


@dataclass(slots=True)
class Added:
    """Gradients added to an update: loss, counts and metrics."""

    loss: Tensor
    """This rank's share of the loss."""
    unit: Tensor
    """``[2]`` tokens and sequences that the loss was divided by."""
    counts: Tensor
    """``[2]`` tokens and sequences that train in the update so far, over all ranks."""
    tally: MetricTotals = field(default_factory=MetricTotals)
    work: Work = field(default_factory=Work)


class Gradients:
    """Accumulates the gradients of updates.

    Args:
        policy: The policy, wrapped for its parallelism.
        objective: Computes the loss.
        balancer: Balances the policy's experts.
        spec: The run.
        ranks: Data-parallel ranks.
        device: Device of the policy.
    """

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        *,
        balancer: Balancer,
        spec: RunSpec,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self._policy = policy
        self._objective = objective
        self._balancer = balancer
        self._spec = spec
        self._ranks = ranks
        self._device = device
        self.on_trained: OnTrained | None = None

    def add(
        self,
        samples: Samples,
        work: Micros,
        *,
        before: Tensor,
        unit: Tensor | None,
        kl_coefficient: float,
    ) -> Added:
        """Adds the gradients of micro-batches to the accumulated ones.

        Args:
            samples: This rank's samples, with all columns that their loss needs.
            work: The micro-batches. All ranks have the same number.
            before: ``[2]`` tokens and sequences of the update that were accumulated before.
            unit: ``[2]`` counts that the accumulated gradients were divided by; None if there are none.
            kl_coefficient: Weight of the KL penalty in the loss.
        """
        counts = before + num_counted(samples.counted, samples, work, self._ranks)
        found = Added(
            torch.zeros((), device=self._device), counts if unit is None else unit, counts
        )
        if unit is None:
            self._balancer.begin_update()
        denominators = self._objective.denominators(*found.unit.to(self._device).unbind())
        for number, micro in enumerate(work):
            begin_micro_batch(
                self._policy, is_last=number + 1 == len(work), spec=self._spec.trainer
            )
            part = samples.select(micro) if micro else idle_samples()
            with fitting(number):
                packed = pack_samples(
                    part, self._device, shares_prefixes=self._spec.shares_prefixes
                )
                logprobs, entropy = self._policy(packed)
                loss = self._objective(
                    logprobs,
                    entropy,
                    part.to(self._device),
                    denominators=denominators,
                    kl_coefficient=kl_coefficient,
                    tally=found.tally,
                )
                loss += self._balancer.loss(part, found.unit[0], found.tally)
                # Data parallelism averages gradients over ranks, but the loss is a sum over them.
                (loss * self._ranks.size).backward()
            if micro and self.on_trained is not None:
                self.on_trained(part, logprobs)
            found.loss += loss.detach()
            found.work += packed.work
        return found


def num_counted(mask: Tensor, samples: Samples, work: Micros, ranks: Ranks) -> Tensor:
    """Counts masked tokens, and sequences that have any, in some micro-batches over all ranks: ``[2]``."""
    own = [position for micro in work for position in micro]
    counts = samples.segments.count(mask)[own]
    return ranks.sum(torch.stack([counts.sum(), (counts > 0).sum()]))


@dataclass(slots=True)
class Early:
    """Accumulated state of a step: metrics of its groups so far and denominators of their gradients."""

    timer: PhaseTimer = field(default_factory=PhaseTimer)
    tally: MetricTotals = field(default_factory=MetricTotals)
    unit: Tensor | None = None
    """``[2]`` tokens and sequences that the gradients were divided by; None before the first group.

    The counts of the whole update are known only at its end.
    """
    counts: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.int64))
    """``[2]`` tokens and sequences that train, over all ranks."""
    loss: Tensor | float = 0.0
    """This rank's share of the loss."""
    sizes: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.int64))
    """``[4]`` samples, tokens, response tokens and trained tokens of this rank."""
    num_samples: int = 0
    """Samples of all ranks."""
    work: Work = field(default_factory=Work)
    """Work of this rank's forward and backward passes."""
    left_out: LeftOut = field(default_factory=LeftOut)
    """Sequences that did not fit into memory, on all ranks."""
    seconds: float = 0.0
    """Seconds that the groups took."""
    compiled_before: int = field(default_factory=num_compiled)

    def add(self, samples: Samples, cohort: BatchFacts, *, seconds: float) -> None:
        """Counts this rank's samples, and those of ``cohort`` over all ranks."""
        prompts, responses = samples.prompts.values, samples.responses.values
        trained = int(samples.tokens["loss_mask"].sum())
        self.sizes += torch.tensor(
            [
                int(samples.is_first.sum()),
                len(prompts) + len(responses),
                len(responses),
                trained,
            ]
        )
        self.num_samples += len(cohort.lengths)
        self.seconds += seconds
