"""One training step of one rank, from fetched samples to new weights and metrics.

    plan -> samples -> proximal and reference logprobs -> advantages
         -> for each update: [micro-batch: forward, objective, backward]* -> clip -> AdamW
         -> metrics over all ranks

Groups that finish early are accumulated first; the weights change once the rest of the step is trained. All
ranks run the same collectives, however many samples each one has.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from services.common.runspec.run import RunSpec
from services.trainer.algorithm.loss import adapted_kl, kl_penalty
from services.trainer.batch.plan import StepPlan
from services.trainer.batch.samples import BatchFacts, Samples
from services.trainer.collectives import MetricTotals, Ranks
from services.trainer.engines.fsdp import optim
from services.trainer.engines.fsdp.balancing import Balancer
from services.trainer.engines.fsdp.oom import Fitting, Micros, OomLimits, oom_in
from services.trainer.engines.fsdp.scorer import score_tokens, without_unscored
from services.trainer.model.flops import active_weights
from services.trainer.model.policy import Policy, trainable
from services.trainer.phases import PhaseTimer
from services.trainer.steps.credit import CreditAssigner
from services.trainer.steps.critic import CriticRunner
from services.trainer.steps.gradients import Added, Early, Gradients, Objective, OnTrained
from services.trainer.steps.report import (
    Update,
    derive,
    describe_batch,
    describe_updates,
    utilization,
)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of a step, the same on every rank."""

    metrics: dict[str, float]
    """Metrics, reduced over all ranks, by name."""
    skipped: bool
    """True if no update was applied because a number was not finite."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Tokens of sequences that did not fit into memory, by sample key."""


class StepRunner:
    """Trains the policy on one batch after another.

    Args:
        policy: The policy, wrapped for its parallelism.
        reference: Frozen policy for a KL penalty, or None.
        critic: Critic for GAE, or None.
        spec: The run.
        ranks: Data-parallel ranks.
        device: Device of the model.
        oom_limits: Micro-batch sizes that are known to exceed memory.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        reference: Policy | None,
        critic: CriticRunner | None = None,
        spec: RunSpec,
        ranks: Ranks,
        device: torch.device,
        oom_limits: OomLimits | None = None,
    ) -> None:
        self._policy = policy
        self._reference = reference
        self.critic = critic
        self._spec = spec
        self._ranks = ranks
        self._device = device
        self._parameters = trainable(policy)
        self._active_weights = active_weights(policy, policy.model.config)
        in_host = spec.trainer.cpu_offload == "optimizer"
        self.optimizer = optim.build_optimizer(policy, spec.trainer.optimizer, in_host=in_host)
        self._balancer = Balancer(policy, spec, ranks)
        self._credit = CreditAssigner(
            spec.algorithm, ranks, max_response_tokens=spec.rollout.max_response_tokens
        )
        self._objective = Objective(
            spec.algorithm, correction=spec.correction, horizon=spec.rollout.max_response_tokens
        )
        kl = spec.algorithm.kl
        self._kl_in_reward = kl.coefficient > 0 and kl.placement == "reward"
        self._kl_in_loss = kl.coefficient > 0 and kl.placement == "loss"
        self._needs_proximal = spec.needs_proximal
        self.kl_coefficient = kl.coefficient
        self.num_updates, self.num_steps = 0, spec.trainer.steps or 1
        self._early = Early()
        self.oom_limits = oom_limits or oom_in(spec.trainer)
        self._fitting = Fitting(policy, spec, device=device, oom_limits=self.oom_limits)
        self._gradients = Gradients(
            policy,
            self._objective,
            balancer=self._balancer,
            spec=spec,
            ranks=ranks,
            device=device,
        )

    def set_trained_callback(self, on_trained: OnTrained) -> None:
        """Sets a function that is called with each trained micro-batch."""
        self._gradients.on_trained = on_trained

    def accumulate(
        self, weight_version: int, samples: Samples, cohort: BatchFacts, plan: StepPlan
    ) -> None:
        """Accumulates gradients of some groups; the next :meth:`run` updates the weights with them.

        Args:
            weight_version: Version of the weights that the step starts from.
            samples: This rank's samples; the plan refers to their positions.
            cohort: These groups. No sample's advantage may depend on another group.
            plan: This rank's work, in one update.

        Raises:
            OomLimitError: If a micro-batch does not fit into memory; the caller must then :meth:`forget`.
        """
        begin, early = time.perf_counter(), self._early
        samples, plan = self._prepared(weight_version, samples, cohort, plan)
        (work,) = plan.updates
        added, _ = self._add(samples, work, early, once=True)
        early.unit, early.counts = added.unit, added.counts
        early.loss += added.loss
        early.add(samples, cohort, seconds=time.perf_counter() - begin)
        early.left_out += self._fitting.left_out_of(samples, cohort, self._ranks)

    def forget(self) -> None:
        """Drops all accumulated gradients."""
        self._early = Early()
        self.optimizer.zero_grad(set_to_none=True)

    def run(
        self, weight_version: int, samples: Samples, cohort: BatchFacts, plan: StepPlan
    ) -> StepResult:
        """Trains one batch, or the part of it that is not accumulated yet.

        Args:
            weight_version: Version of the weights that the step starts from.
            samples: This rank's samples; the plan refers to their positions.
            cohort: The whole batch, without the accumulated groups.
            plan: This rank's work.

        Raises:
            OomLimitError: If a micro-batch does not fit into memory and its update cannot be repeated.
        """
        begin, early = time.perf_counter(), self._early
        samples, plan = self._prepared(weight_version, samples, cohort, plan)
        trains_policy = weight_version >= self._spec.critic.warmup_steps
        updates = [
            self._update(samples, work, early, trains_policy=trains_policy) for work in plan.updates
        ]
        self._early = Early()
        early.add(self._fitting.kept(samples), cohort, seconds=time.perf_counter() - begin)
        early.left_out += self._fitting.left_out_of(samples, cohort, self._ranks)
        with early.timer("metrics"):
            metrics = self._summary(updates, early)
        self.kl_coefficient = adapted_kl(
            self.kl_coefficient,
            self._spec.algorithm.kl,
            divergence=metrics.get("kl_ref", math.nan),
            num_samples=early.num_samples,
        )
        metrics |= {f"seconds_{phase}": spent for phase, spent in early.timer.seconds.items()}
        metrics |= utilization(
            early,
            self._policy.model.config,
            active_weights=self._active_weights,
            ranks=self._ranks,
            device=self._device,
            num_gpus=self._spec.trainer.world_size,
        )
        return StepResult(
            metrics=metrics,
            skipped=not any(update.applied for update in updates),
            left_out=early.left_out.tokens,
        )

    def parts(self) -> dict[str, tuple[nn.Module, torch.optim.AdamW]]:
        """Returns each trained module with its optimizer, by the prefix of its parameter names."""
        parts: dict[str, tuple[nn.Module, torch.optim.AdamW]] = {"": (self._policy, self.optimizer)}
        if self.critic is not None:
            parts["critic."] = (self.critic.critic, self.critic.optimizer)
        return parts

    def facts(self) -> dict[str, float]:
        """Returns the numbers that a checkpoint stores besides the tensors."""
        critic = {} if self.critic is None else {"critic.num_updates": self.critic.num_updates}
        return {"num_updates": self.num_updates, "kl_coefficient": self.kl_coefficient, **critic}

    def restore(self, facts: Mapping[str, float]) -> None:
        """Restores the numbers of a checkpoint."""
        self.num_updates = int(facts["num_updates"])
        self.kl_coefficient = float(facts["kl_coefficient"])
        if self.critic is not None:
            self.critic.num_updates = int(facts["critic.num_updates"])

    def _prepared(
        self, weight_version: int, samples: Samples, cohort: BatchFacts, plan: StepPlan
    ) -> tuple[Samples, StepPlan]:
        """Adds all columns that the loss needs; drops from the plan what does not fit into memory."""
        timer, tally = self._early.timer, self._early.tally
        samples = self._with_frozen_logprobs(samples, plan, timer)
        samples, plan = without_unscored(samples, plan)
        self._fitting.begin(plan.left_out)
        if self._spec.interpolates_proximal:
            age = (weight_version - samples.tokens["token_versions"]).clamp(min=0)
            samples = samples.with_tokens(age=age.float())
        with timer("advantage"):
            samples = self._with_advantages(samples, cohort, tally)
            samples = self._objective.look_ahead(samples, self._ranks)
        describe_batch(
            weight_version,
            samples,
            cohort,
            tally,
            max_staleness=self._spec.algorithm.max_staleness,
        )
        return samples, plan

    def _with_frozen_logprobs(self, samples: Samples, plan: StepPlan, timer: PhaseTimer) -> Samples:
        """Adds the logprobs and values that no update of the step changes."""
        if self._needs_proximal and "proximal_logprobs" not in samples.tokens:
            with timer("old_logprob"):
                scored = self._score(self._policy, samples, plan)
            samples = samples.with_tokens(proximal_logprobs=scored)
        if self._reference is not None and "ref_logprobs" not in samples.tokens:
            with timer("ref_logprob"):
                scored = self._score(self._reference, samples, plan)
            samples = samples.with_tokens(ref_logprobs=scored)
        if self.critic is not None:
            with timer("critic"):
                samples = samples.with_tokens(values=self.critic.values(samples, plan))
        return samples

    def _score(self, policy: Policy, samples: Samples, plan: StepPlan) -> Tensor:
        """Returns ``[R]`` logprobs on the CPU, without gradients."""
        return score_tokens(
            policy,
            lambda packed: policy(packed)[0],
            samples,
            plan,
            device=self._device,
            shares_prefixes=self._spec.shares_prefixes,
            oom_limits=self.oom_limits,
        )

    def _with_advantages(
        self, samples: Samples, cohort: BatchFacts, tally: MetricTotals
    ) -> Samples:
        credit = self._credit(
            samples, cohort, kl_coefficient=self.kl_coefficient if self._kl_in_reward else 0.0
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
        counted = cohort.is_member[samples.rows] & samples.is_first
        tally.mean("score_mean", credit.shaped_scores, counted)
        if credit.returns is not None:
            samples = samples.with_tokens(returns=credit.returns)
        return samples.with_tokens(advantages=credit.advantages)

    def _update(
        self,
        samples: Samples,
        work: Micros,
        early: Early,
        *,
        trains_policy: bool,
    ) -> Update:
        timer, tally = early.timer, early.tally
        added, work = self._add(samples, work, early, once=early.unit is not None)
        loss = early.loss + added.loss
        if early.unit is not None:
            scale = self._objective.rescaling(added.unit, added.counts).to(self._device)
            optim.scale_gradients(self._parameters, scale)
            loss = loss * scale
        moves = trains_policy and bool(added.counts[0])
        with timer("optimizer"):
            update = replace(self._apply(loss, moves=moves), is_empty=not added.counts[0])
        self._balancer.updated(moved=update.applied and moves)
        if self.critic is not None and update.applied:
            with timer("critic"):
                applied = self.critic.update(samples, work, tally=tally, num_steps=self.num_steps)
            update = replace(update, critic_applied=applied)
        return update

    def _add(
        self, samples: Samples, work: Micros, early: Early, *, once: bool
    ) -> tuple[Added, Micros]:
        """Adds the gradients of an update or a part of it; returns them and the micro-batches that fitted."""
        add = partial(
            self._gradients.add,
            samples,
            before=early.counts,
            unit=early.unit,
            kl_coefficient=self.kl_coefficient if self._kl_in_loss else 0.0,
        )
        with early.timer("forward_backward"):
            added, work = self._fitting.fitted(add, samples, work, once=once)
        early.tally.merge(added.tally)
        early.work += added.work
        return added, work

    def _apply(self, share: Tensor, *, moves: bool) -> Update:
        """Clips the gradients and updates the weights, unless a number is not finite.

        Args:
            share: This rank's share of the loss.
            moves: True if weights may change. Without trained tokens, momentum and decay alone would do it.
        """
        spec = self._spec.trainer
        norm = optim.gradient_norm(self._parameters)
        loss = self._ranks.sum(share.reshape(1).double()).item()
        applied = math.isfinite(loss) and math.isfinite(norm.item())
        rate = 0.0
        if applied and moves:
            self.num_updates += 1
            rate = optim.learning_rate(
                spec.optimizer,
                update=self.num_updates,
                num_updates=self.num_steps * spec.updates_per_step,
            )
            optim.set_learning_rate(self.optimizer, rate)
            optim.clip_gradients(self._parameters, norm, spec.optimizer.max_grad_norm)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Update(loss=loss, grad_norm=norm.item(), learning_rate=rate, applied=applied)

    def _summary(self, updates: Sequence[Update], early: Early) -> dict[str, float]:
        names = ("samples", "tokens", "response_tokens", "trained_tokens")
        metrics = dict(zip(names, map(float, self._ranks.sum(early.sizes)), strict=True))
        metrics |= early.tally.reduce(self._ranks)
        metrics = derive(metrics, self._spec) | self._balancer.metrics()
        metrics |= describe_updates(updates)
        metrics["kl_coefficient"] = self.kl_coefficient
        metrics |= self._fitting.metrics()
        metrics["left_out_sequences"] = float(early.left_out.num_sequences)
        return metrics
