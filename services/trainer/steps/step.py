"""One training step of one rank, from fetched samples to new weights and metrics; of a policy or a critic.

    plan -> samples -> proximal and reference logprobs -> advantages
         -> for each update: [micro-batch: forward, objective, backward]* -> clip -> AdamW
         -> metrics over all ranks

Groups that finish early are accumulated first; the weights change once the rest of the step is trained. All
ranks run the same collectives, however many samples each one has.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from services.common.errors import FailedPreconditionError
from services.common.fields import TEACHER_TOP_K
from services.common.runspec.run import RunSpec
from services.common.telemetry.metrics import PhaseTimer
from services.trainer.algorithm.loss import adapted_entropy, adapted_kl, kl_penalty
from services.trainer.batch.columns import SCORED, TEACHER_STATES, check_columns
from services.trainer.batch.samples import BatchFacts, Samples
from services.trainer.batch.step_plan import StepPlan
from services.trainer.checkpoint.compatibility import CRITIC
from services.trainer.collectives import MetricTotals
from services.trainer.engines.base import UNSCORED, Micros, Passes, TrainEngine
from services.trainer.steps.credit import CreditAssigner
from services.trainer.steps.critic import CriticRunner
from services.trainer.steps.objective import Objective, PolicyLoss, num_counted
from services.trainer.steps.report import (
    StepAccumulator,
    Update,
    derive,
    describe_batch,
    describe_updates,
    left_out_of,
    utilization,
)
from services.trainer.steps.updates import Updates

OnTrained = Callable[[Samples, Tensor], None]
"""Called with each trained micro-batch and its logprobs ``[R]``, computed before the update."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of a step, the same on every rank."""

    metrics: dict[str, float]
    """Metrics, reduced over all ranks, by name."""
    skipped: bool
    """True if no update was applied because a number was not finite."""
    overflowed: bool = False
    """True if all skipped updates of a skipped step overflowed in float16, which lowers the loss scale."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Tokens of sequences that did not fit into memory, by sample key."""


class StepRunner:
    """Trains the policy on one batch after another.

    Args:
        reference: Engine of the frozen policy for a KL penalty, or None.
    """

    def __init__(
        self,
        engine: TrainEngine,
        *,
        reference: TrainEngine | None,
        critic: CriticRunner | None = None,
        spec: RunSpec,
    ) -> None:
        self.engine = engine
        self._reference = reference
        self.critic = critic
        self.on_trained: OnTrained | None = None
        self._spec = spec
        self._ranks = ranks = engine.ranks
        self._updates = Updates(engine, spec.trainer.optimizer, trainer=spec.trainer)
        self._credit = CreditAssigner(
            spec.algorithm, ranks, max_response_tokens=spec.rollout.max_response_tokens
        )
        self._objective = Objective(
            spec.algorithm, correction=spec.correction, horizon=spec.rollout.max_response_tokens
        )
        declared = {
            "algorithm.loss": self._objective.columns,
            "algorithm.advantage": self._credit.columns,
        }
        check_columns(declared, spec.reward_columns)
        kl = spec.algorithm.kl
        self._kl_in_reward = kl.coefficient > 0 and kl.placement == "reward"
        self._kl_in_loss = kl.coefficient > 0 and kl.placement == "loss"
        self._needs_proximal = spec.needs_proximal
        self.kl_coefficient = kl.coefficient
        self.entropy_weight = spec.algorithm.entropy_coefficient
        self.num_steps = spec.trainer.steps or 1
        self._samples_per_step = spec.trainer.prompts_per_step * spec.samples_per_group
        self._early = StepAccumulator()

    def accumulate(
        self, weight_version: int, samples: Samples, facts: BatchFacts, plan: StepPlan
    ) -> None:
        """Accumulates gradients of some groups; the next :meth:`run` updates the weights with them.

        Args:
            weight_version: Version of the weights that the step starts from.
            samples: This rank's samples; the plan refers to their positions.
            facts: These groups. No sample's advantage may depend on another group.
            plan: This rank's work, in one update.

        Raises:
            OomLimitError: If a micro-batch does not fit; the caller must then :meth:`drop_gradients`.
        """
        begin, early = time.perf_counter(), self._early
        samples, plan = self._prepared(weight_version, samples, facts, plan)
        (work,) = plan.updates
        share = len(facts.lengths) / self._samples_per_step
        passes = self._add(samples, work, early, may_repeat=False, sample_share=share)
        early.unit, early.counts = passes.loss_of.unit, passes.loss_of.counts
        early.weight += passes.loss_of.total_weight
        early.loss += passes.loss
        early.add(samples, facts, seconds=time.perf_counter() - begin)
        early.left_out += left_out_of(plan.left_out, samples, facts, self._ranks)

    def drop_gradients(self) -> None:
        self._early = StepAccumulator()
        self.engine.optimizer_step(None)

    def run(
        self,
        weight_version: int,
        samples: Samples,
        facts: BatchFacts,
        plan: StepPlan,
        *,
        step: int | None = None,
    ) -> StepResult:
        """Trains one batch, or the part of it that is not accumulated yet.

        Args:
            weight_version: Version of the weights that the step starts from.
            samples: This rank's samples; the plan refers to their positions.
            facts: The whole batch, without the accumulated groups.
            step: Number of the step, from 1; None means ``weight_version + 1``, which it is unless the run
                was rewound.

        Raises:
            OomLimitError: If a micro-batch does not fit into memory and its update cannot be repeated.
        """
        begin, early = time.perf_counter(), self._early
        samples, plan = self._prepared(weight_version, samples, facts, plan)
        step = weight_version + 1 if step is None else step
        trains_policy = step > self._spec.critic.warmup_steps
        updates, left_out = [], set(plan.left_out)
        for work in plan.updates:
            update, passes = self._update(samples, work, early, trains_policy=trains_policy)
            updates.append(update)
            left_out |= passes.left_out
        self._early = StepAccumulator()
        early.add(_kept(samples, left_out), facts, seconds=time.perf_counter() - begin)
        early.left_out += left_out_of(left_out, samples, facts, self._ranks)
        with early.timer("metrics"):
            metrics = self._summary(updates, early)
        self.kl_coefficient = adapted_kl(
            self.kl_coefficient,
            self._spec.algorithm.kl,
            divergence=metrics.get("kl_ref", math.nan),
            num_samples=early.num_samples,
        )
        self.entropy_weight, self._objective.entropy_coefficient = adapted_entropy(
            self.entropy_weight, self._spec.algorithm, entropy=metrics.get("entropy", math.nan)
        )
        metrics |= {f"seconds_{phase}": seconds for phase, seconds in early.timer.seconds.items()}
        metrics |= utilization(early, self.engine, num_gpus=self._spec.trainer.world_size)
        return StepResult(
            metrics=metrics,
            skipped=not any(update.outcome == "applied" for update in updates),
            overflowed=all(update.outcome == "overflow" for update in updates),
            left_out=early.left_out.tokens,
        )

    def trained(self) -> dict[str, TrainEngine]:
        if self.critic is None:
            return {"": self.engine}
        return {"": self.engine, CRITIC: self.critic.engine}

    def engines(self) -> list[TrainEngine]:
        frozen = [] if self._reference is None else [self._reference]
        return [*self.trained().values(), *frozen]

    def facts(self) -> dict[str, float]:
        critic = {} if self.critic is None else self.critic.updates.facts(CRITIC)
        return {
            **self._updates.facts(""),
            "kl_coefficient": self.kl_coefficient,
            "entropy_weight": self.entropy_weight,
            "entropy_coefficient": self._objective.entropy_coefficient,
            **critic,
        }

    def restore(self, facts: Mapping[str, float]) -> None:
        self._updates.restore(facts, "")
        self.kl_coefficient = float(facts["kl_coefficient"])
        self.entropy_weight = float(facts["entropy_weight"])
        self._objective.entropy_coefficient = float(facts["entropy_coefficient"])
        if self.critic is not None:
            self.critic.updates.restore(facts, CRITIC)

    def _prepared(
        self, weight_version: int, samples: Samples, facts: BatchFacts, plan: StepPlan
    ) -> tuple[Samples, StepPlan]:
        """Adds all columns that the loss needs; drops from the plan what does not fit into memory."""
        timer, tally = self._early.timer, self._early.tally
        samples = self._with_frozen_logprobs(samples, plan, timer)
        samples, plan = without_unscored(samples, plan)
        if "token_versions" in samples.tokens:
            age = (weight_version - samples.tokens["token_versions"]).clamp(min=0).float()
            samples = samples.with_tokens(staleness=age)
            if self._spec.interpolates_proximal:
                samples = samples.with_tokens(age=age)
        with timer("advantage"):
            samples = self._with_advantages(samples, facts, tally)
            samples = self._objective.look_ahead(samples, self._ranks)
        describe_batch(
            weight_version, samples, facts, tally, max_staleness=self._spec.algorithm.max_staleness
        )
        return samples, plan

    def _with_frozen_logprobs(self, samples: Samples, plan: StepPlan, timer: PhaseTimer) -> Samples:
        """Adds the logprobs and values that no update of the step changes."""
        if self._needs_proximal and "proximal_logprobs" not in samples.tokens:
            with timer("old_logprob"):
                scored = self.engine.forward_logprobs(samples, plan)
            samples = samples.with_tokens(proximal_logprobs=scored)
        is_compared = self._kl_in_loss or self._kl_in_reward or not self._spec.distillation
        if self._reference and is_compared and "ref_logprobs" not in samples.tokens:
            with timer("ref_logprob"):
                scored = self._reference.forward_logprobs(samples.of_teacher, plan)
            samples = samples.with_tokens(ref_logprobs=scored)
        if (distill := self._spec.distillation) and samples.distributions is None:
            column = TEACHER_STATES if distill.top_k is None else TEACHER_TOP_K
            with timer("ref_logprob"):
                # Without a reference, the policy before its updates is its own teacher.
                teacher = self._reference or self.engine
                values = teacher.forward_logprobs(samples.of_teacher, plan, teaches=distill)
            samples = samples.with_tokens(**{column: values})
        if self.critic is not None:
            with timer("critic"):
                samples = samples.with_tokens(
                    values=self.critic.engine.forward_logprobs(samples, plan)
                )
        return samples

    def _with_advantages(self, samples: Samples, facts: BatchFacts, tally: MetricTotals) -> Samples:
        credit = self._credit(
            samples, facts, kl_coefficient=self.kl_coefficient if self._kl_in_reward else 0.0
        )
        if self._kl_in_reward:
            penalty = kl_penalty(
                samples.tokens["proximal_logprobs"],
                samples.tokens["ref_logprobs"],
                estimator=self._spec.algorithm.kl.estimator,
            )
            tally.mean("kl_ref", penalty, samples.tokens["response_mask"])
        mask = samples.tokens["loss_mask"]
        tally.mean("advantage_abs_mean", credit.advantages.abs(), mask)
        tally.mean("zero_advantage_fraction", (credit.advantages == 0).float(), mask)
        counted_samples = facts.is_member[samples.rows] & samples.is_first
        tally.mean("score_mean", credit.shaped_scores, counted_samples)
        if credit.returns is not None:
            samples = samples.with_tokens(returns=credit.returns)
        return samples.with_tokens(advantages=credit.advantages)

    def _update(
        self, samples: Samples, work: Micros, early: StepAccumulator, *, trains_policy: bool
    ) -> tuple[Update, Passes[PolicyLoss]]:
        passes = self._add(samples, work, early, may_repeat=early.unit is None)
        counts, scale = passes.loss_of.counts, None
        share = early.loss + passes.loss
        if early.unit is not None:
            scale = self._objective.rescaling(passes.loss_of.unit, counts).to(self.engine.device)
            share = share * scale
        # Without trained tokens, momentum and decay alone would change the weights.
        moves = trains_policy and bool(counts[0])
        with early.timer("optimizer"):
            loss = self._ranks.sum(share.reshape(1).double()).item()
            # The schedule of the policy begins after the critic's warm-up, and ends with the run.
            num_steps = max(1, self.num_steps - self._spec.critic.warmup_steps)
            applied = self._updates.apply(moves=moves, loss=loss, num_steps=num_steps, scale=scale)
        update = Update(
            loss=loss,
            grad_norm=applied.optimizer_step.grad_norm,
            learning_rate=applied.learning_rate,
            outcome=applied.outcome,
            is_empty=not counts[0],
            expert_counts=applied.optimizer_step.expert_counts,
        )
        if self.critic is not None and update.outcome != "not_finite":
            with early.timer("critic"):
                outcome = self.critic.update(
                    samples, passes.micros, tally=early.tally, num_steps=self.num_steps
                )
            update = replace(update, critic=outcome)
        return update, passes

    def _add(
        self,
        samples: Samples,
        work: Micros,
        early: StepAccumulator,
        *,
        may_repeat: bool,
        sample_share: float | None = None,
    ) -> Passes[PolicyLoss]:
        """Adds the gradients of an update or a part of it.

        Args:
            sample_share: Share of the update's samples that are in this part; None if it is the last.
        """

        def make_loss(micros: Micros) -> PolicyLoss:
            counts_added = num_counted(samples.counted, samples, micros, self._ranks)
            counts = early.counts + counts_added
            unit = counts if early.unit is None else early.unit
            weight = 1.0 / self._objective.rescaling(unit, counts) - early.weight
            if sample_share is not None:
                weight = self._objective.early_weight(counts_added, unit, sample_share=sample_share)
            return PolicyLoss(
                self._objective,
                counts=counts,
                unit=unit,
                num_tokens=counts_added[0],
                total_weight=weight,
                kl_coefficient=self.kl_coefficient if self._kl_in_loss else 0.0,
                keeps_logprobs=self.on_trained is not None,
            )

        with early.timer("forward_backward"):
            passes = self.engine.forward_backward(
                samples, work, make_loss, may_repeat=may_repeat, loss_scale=self._updates.loss_scale
            )
        if self.on_trained is not None:
            for micro_batch, logprobs in passes.loss_of.trained:
                self.on_trained(micro_batch, logprobs)
        early.tally.merge(passes.loss_of.tally)
        early.work += passes.work
        early.num_packs += len(passes.micros)
        early.num_divided += passes.num_divided
        return passes

    def _summary(self, updates: Sequence[Update], early: StepAccumulator) -> dict[str, float]:
        names = ("samples", "tokens", "response_tokens", "trained_tokens")
        metrics = dict(zip(names, map(float, self._ranks.sum(early.sizes)), strict=True))
        metrics |= early.tally.reduce(self._ranks)
        metrics = derive(metrics, self._spec)
        metrics |= describe_updates(updates)
        metrics["kl_coefficient"] = self.kl_coefficient
        if self._spec.algorithm.entropy_target is not None:
            metrics["entropy_coefficient"] = self._objective.entropy_coefficient
        metrics |= self._updates.describe_scale([update.outcome for update in updates])
        if self.critic is not None:
            outcomes = [update.critic for update in updates]
            metrics["critic_skipped"] = float(set(outcomes) == {"not_finite"})
            metrics |= self.critic.updates.describe_scale(outcomes, "critic_")
        metrics["divided_micro_batches"] = float(early.num_divided)
        metrics["left_out_sequences"] = float(early.left_out.num_sequences)
        return metrics


def _kept(samples: Samples, left_out: Collection[int]) -> Samples:
    """Masks the tokens of left-out sequences from the loss."""
    trains = torch.ones(len(samples.rows), dtype=torch.bool)
    trains[list(left_out)] = False
    mask = samples.tokens["loss_mask"] & samples.segments.expand(trains)
    return samples.with_tokens(loss_mask=mask)


def without_unscored(samples: Samples, plan: StepPlan) -> tuple[Samples, StepPlan]:
    """Leaves out of a step the sequences that its plan excludes or that some model could not score."""
    columns = [samples.tokens[name] for name in SCORED if name in samples.tokens]
    left_out = torch.zeros(len(samples.rows), dtype=torch.bool)
    left_out[list(plan.left_out)] = True
    for column in columns:
        # A rank may have no samples, so ``reshape(len(column), -1)`` would be ambiguous.
        unscored = (column == UNSCORED).unsqueeze(-1).flatten(1).any(1)
        left_out |= samples.segments.count(unscored) > 0
    if not left_out.any():
        return samples, plan
    if samples.groups is not None:
        # If the loss compares the members of a group, either all of them train or none.
        left_out = torch.isin(samples.groups, samples.groups[left_out])
    is_unscored = samples.segments.expand(left_out)
    # If all logprobs and values are 0, a sequence gets no penalty; its reward still counts in its group.
    wiped = {
        name: samples.tokens[name].masked_fill(
            is_unscored.view(-1, *[1] * (samples.tokens[name].ndim - 1)), 0.0
        )
        for name in SCORED
        if name in samples.tokens
    }
    samples = samples.with_tokens(**wiped, loss_mask=samples.tokens["loss_mask"] & ~is_unscored)
    return samples, plan.without(left_out.nonzero().flatten().tolist())


class CriticStepRunner:
    """Trains a critic that has its own processes, on the batches and towards the returns of the policy."""

    def __init__(self, critic: CriticRunner, *, spec: RunSpec) -> None:
        self.critic = critic
        self.engine = critic.engine
        self.num_steps = spec.trainer.steps or 1
        self._credit = CreditAssigner(
            spec.algorithm, self.engine.ranks, max_response_tokens=spec.rollout.max_response_tokens
        )

    def run(
        self,
        weight_version: int,
        samples: Samples,
        facts: BatchFacts,
        plan: StepPlan,
        *,
        step: int | None = None,
    ) -> StepResult:
        """Trains one batch.

        Args:
            weight_version: Version of the policy's weights that the step starts from.
            samples: This rank's samples, with the ``values`` that the critic computed before.
            step: Has no effect: the critic trains in every step.
        """
        begin, tally = time.perf_counter(), MetricTotals()
        samples, plan = without_unscored(samples, plan)
        left_out = torch.tensor([float(len(plan.left_out))])
        tally.max("critic_left_out_sequences", left_out, torch.ones(1, dtype=torch.bool))
        credit = self._credit(samples, facts, kl_coefficient=0.0)
        assert credit.returns is not None, "an advantage with a critic gives its targets"
        samples = samples.with_tokens(returns=credit.returns)
        outcomes = [
            self.critic.update(samples, work, tally=tally, num_steps=self.num_steps)
            for work in plan.updates
        ]
        metrics = tally.reduce(self.engine.ranks)
        metrics["seconds_critic"] = time.perf_counter() - begin
        metrics["nonfinite_critic"] = float(outcomes.count("not_finite"))
        metrics |= self.critic.updates.describe_scale(outcomes, "critic_")
        return StepResult(
            metrics=metrics,
            skipped="applied" not in outcomes,
            overflowed=set(outcomes) == {"overflow"},
        )

    def accumulate(
        self, weight_version: int, samples: Samples, facts: BatchFacts, plan: StepPlan
    ) -> None:
        """Raises an error, because the critic's targets depend on the whole batch.

        Raises:
            FailedPreconditionError: Always.
        """
        raise FailedPreconditionError("a critic trains whole steps; only the policy trains early")

    def drop_gradients(self) -> None:
        """Does nothing, because nothing is accumulated."""

    def trained(self) -> dict[str, TrainEngine]:
        """Returns the critic's engine; its checkpoint needs no subfolder."""
        return {"": self.engine}

    def engines(self) -> list[TrainEngine]:
        return [self.engine]

    def facts(self) -> dict[str, float]:
        return self.critic.updates.facts("")

    def restore(self, facts: Mapping[str, float]) -> None:
        self.critic.updates.restore(facts, "")
