"""One training step of one rank, from fetched samples to new weights and metrics.

    plan -> samples -> proximal and reference logprobs -> advantages
         -> for each update: [micro-batch: forward, objective, backward]* -> clip -> AdamW
         -> metrics over all ranks

Every rank runs the same sequence of collectives, whatever its share of the batch is.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from services.common.spec.run import RunSpec
from services.trainer.algorithm.credit import assign_credit
from services.trainer.algorithm.loss import kl_penalty
from services.trainer.algorithm.objective import Objective
from services.trainer.batch.packing import PackedTokens, pack
from services.trainer.batch.plan import StepPlan
from services.trainer.batch.report import derive, describe_batch
from services.trainer.batch.samples import Cohort, Samples, idle_samples
from services.trainer.batch.scores import score_tokens
from services.trainer.critic.runner import CriticRunner
from services.trainer.model import optim
from services.trainer.model.flops import peak_flops, training_flops
from services.trainer.model.parallel import begin_micro_batch
from services.trainer.model.policy import Policy, trainable
from services.trainer.phases import PhaseTimer
from services.trainer.ranks.collectives import Ranks, Tally

_KL_STEP = 0.2
_KL_LEAST = 0.5


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of a step, the same on every rank."""

    metrics: dict[str, float]
    """Reduced numbers by name."""
    skipped: bool
    """Whether no update was applied, because a number was not finite."""


@dataclass(frozen=True, slots=True)
class _Update:
    """One optimizer update."""

    loss: float
    grad_norm: float
    learning_rate: float
    applied: bool
    critic_applied: bool = True


class StepRunner:
    """Trains the policy on one batch after another.

    Args:
        policy: The policy, wrapped for its parallelism.
        reference: Frozen policy for a KL penalty, or None.
        critic: For GAE, or None.
        spec: The run.
        ranks: Data-parallel ranks.
        device: Of the model.
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
    ) -> None:
        self._policy = policy
        self._reference = reference
        self.critic = critic
        self._spec = spec
        self._ranks = ranks
        self._device = device
        self._parameters = trainable(policy)
        self.optimizer = optim.build_optimizer(self._parameters, spec.trainer.optimizer)
        correction = spec.algorithm.resolved_correction(
            updates_per_step=spec.trainer.updates_per_step
        )
        self._objective = Objective(
            spec.algorithm, correction=correction, horizon=spec.rollout.max_response_tokens
        )
        kl = spec.algorithm.kl
        self._kl_in_reward = kl.coefficient > 0 and kl.placement == "reward"
        self._kl_in_loss = kl.coefficient > 0 and kl.placement == "loss"
        self._needs_proximal = spec.needs_proximal
        self.kl_coefficient = kl.coefficient
        self.num_updates = 0

    def run(
        self, weight_version: int, samples: Samples, cohort: Cohort, plan: StepPlan
    ) -> StepResult:
        """Train one batch.

        Args:
            weight_version: Number of the weights that the step starts from.
            samples: This rank's samples, in the order of ``plan.rows``.
            cohort: The whole batch.
            plan: What this rank does.
        """
        timer, tally = PhaseTimer(), Tally()
        begin = time.perf_counter()
        samples = self._with_frozen_logprobs(samples, plan, timer)
        with timer("advantage"):
            samples = self._with_advantages(samples, cohort, tally)
        describe_batch(weight_version, samples, tally)
        updates = [self._update(samples, work, tally, timer) for work in plan.updates]
        with timer("metrics"):
            metrics = self._summary(samples, updates, tally)
        self._adapt_kl(metrics, len(cohort.groups))
        metrics |= {f"seconds_{phase}": spent for phase, spent in timer.seconds.items()}
        metrics |= self._utilization(metrics, cohort, time.perf_counter() - begin)
        return StepResult(metrics=metrics, skipped=not any(update.applied for update in updates))

    def parts(self) -> dict[str, tuple[nn.Module, torch.optim.AdamW]]:
        """Everything that is trained, with its optimizer, by the prefix of its names."""
        parts: dict[str, tuple[nn.Module, torch.optim.AdamW]] = {"": (self._policy, self.optimizer)}
        if self.critic is not None:
            parts["critic."] = (self.critic.critic, self.critic.optimizer)
        return parts

    def facts(self) -> dict[str, float]:
        """Numbers that a checkpoint keeps besides the tensors."""
        return {"num_updates": self.num_updates, "kl_coefficient": self.kl_coefficient}

    def restore(self, facts: Mapping[str, float]) -> None:
        """Continue from the numbers of a checkpoint."""
        self.num_updates = int(facts["num_updates"])
        self.kl_coefficient = float(facts["kl_coefficient"])

    def _packed(self, samples: Samples) -> PackedTokens:
        return pack(samples.prompts, samples.responses, device=self._device)

    def _utilization(
        self, metrics: Mapping[str, float], cohort: Cohort, seconds: float
    ) -> dict[str, float]:
        """What the step made of the device; nothing where that is not known."""
        if self._device.type != "cuda":
            return {}
        used = {"gpu_memory_peak_bytes": float(torch.cuda.max_memory_allocated(self._device))}
        peak = peak_flops(self._device)
        if peak is not None:
            flops = training_flops(
                self._policy.model.config, cohort.lengths, int(metrics["response_tokens"])
            )
            used["mfu"] = flops / seconds / peak / self._spec.trainer.world_size
        return used

    def _with_frozen_logprobs(self, samples: Samples, plan: StepPlan, timer: PhaseTimer) -> Samples:
        """Add what the step compares with and no update changes."""
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
        """``[R]`` logprobs on the CPU, without gradients."""
        return score_tokens(
            policy, lambda packed: policy(packed)[0], samples, plan, device=self._device
        )

    def _with_advantages(self, samples: Samples, cohort: Cohort, tally: Tally) -> Samples:
        credit = assign_credit(
            samples,
            cohort,
            self._spec.algorithm,
            self._ranks,
            max_response_tokens=self._spec.rollout.max_response_tokens,
            kl_coefficient=self.kl_coefficient if self._kl_in_reward else 0.0,
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
        if credit.shaped_scores is not None:
            member = cohort.is_member[samples.rows]
            tally.mean("score_mean", credit.shaped_scores, member)
        if credit.returns is not None:
            samples = samples.with_tokens(returns=credit.returns)
        return samples.with_tokens(advantages=credit.advantages)

    def _update(
        self,
        samples: Samples,
        work: tuple[tuple[int, ...], ...],
        tally: Tally,
        timer: PhaseTimer,
    ) -> _Update:
        with timer("forward_backward"):
            loss = self._accumulate(samples, work, tally)
        with timer("optimizer"):
            update = self._apply(loss)
        if self.critic is not None and update.applied:
            with timer("critic"):
                rate = update.learning_rate
                applied = self.critic.update(samples, work, learning_rate=rate, tally=tally)
            update = replace(update, critic_applied=applied)
        return update

    def _accumulate(
        self, samples: Samples, work: tuple[tuple[int, ...], ...], tally: Tally
    ) -> Tensor:
        """Add up the gradients of one update; returns this rank's share of its loss."""
        own = [position for micro in work for position in micro]
        counts = samples.segments.count(samples.tokens["loss_mask"])[own]
        totals = self._ranks.sum(torch.stack([counts.sum(), (counts > 0).sum()]))
        denominators = self._objective.denominators(*totals.to(self._device).unbind())
        total = torch.zeros((), device=self._device)
        for number, micro in enumerate(work, start=1):
            begin_micro_batch(
                self._policy,
                is_last=number == len(work),
                spec=self._spec.trainer,
                ranks=self._ranks,
            )
            part = samples.select(micro) if micro else idle_samples()
            logprobs, entropy = self._policy(self._packed(part))
            loss = self._objective(
                logprobs,
                entropy,
                part.to(self._device),
                denominators=denominators,
                kl_coefficient=self.kl_coefficient if self._kl_in_loss else 0.0,
                tally=tally,
            )
            # Gradients are averaged over ranks, but the loss is a sum over them.
            (loss * self._ranks.size).backward()
            total += loss.detach()
        return total

    def _apply(self, share: Tensor) -> _Update:
        """Clip the gradients and update the weights, unless a number is not finite."""
        spec = self._spec.trainer
        norm = optim.gradient_norm(self._parameters)
        loss = self._ranks.sum(share.reshape(1).double()).item()
        applied = math.isfinite(loss) and math.isfinite(norm.item())
        rate = 0.0
        if applied:
            self.num_updates += 1
            rate = optim.learning_rate(
                spec.optimizer,
                update=self.num_updates,
                num_updates=spec.steps * spec.updates_per_step,
            )
            optim.set_learning_rate(self.optimizer, rate)
            optim.scale_gradients(self._parameters, norm, spec.optimizer.max_grad_norm)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return _Update(loss=loss, grad_norm=norm.item(), learning_rate=rate, applied=applied)

    def _summary(
        self, samples: Samples, updates: Sequence[_Update], tally: Tally
    ) -> dict[str, float]:
        counts = torch.tensor(
            [
                len(samples.rows),
                len(samples.prompts.values) + len(samples.responses.values),
                len(samples.responses.values),
                int(samples.tokens["loss_mask"].sum()),
            ]
        )
        names = ("samples", "tokens", "response_tokens", "trained_tokens")
        metrics = dict(zip(names, map(float, self._ranks.sum(counts)), strict=True))
        metrics |= tally.reduce(self._ranks)
        metrics = derive(metrics)
        metrics["loss"] = sum(update.loss for update in updates) / len(updates)
        metrics["grad_norm"] = max(update.grad_norm for update in updates)
        metrics["learning_rate"] = updates[-1].learning_rate
        metrics["kl_coefficient"] = self.kl_coefficient
        metrics["nonfinite_updates"] = float(sum(not update.applied for update in updates))
        metrics["nonfinite_loss"] = float(sum(not math.isfinite(u.loss) for u in updates))
        metrics["nonfinite_grad"] = metrics["nonfinite_updates"] - metrics["nonfinite_loss"]
        metrics["nonfinite_critic"] = float(sum(not update.critic_applied for update in updates))
        return metrics

    def _adapt_kl(self, metrics: Mapping[str, float], num_samples: int) -> None:
        """Move the KL coefficient towards its target (Ziegler et al., arXiv:1909.08593)."""
        kl = self._spec.algorithm.kl
        # After a skipped step the divergence may be no number, and then the coefficient never was one again.
        if kl.target is None or not math.isfinite(metrics.get("kl_ref", math.nan)):
            return
        error = min(max(metrics["kl_ref"] / kl.target - 1.0, -_KL_STEP), _KL_STEP)
        # Over a horizon of few samples the formula would turn the sign, and reward leaving the reference.
        self.kl_coefficient *= max(1.0 + error * num_samples / kl.horizon, _KL_LEAST)
