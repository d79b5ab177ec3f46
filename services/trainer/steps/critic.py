"""The critic of GAE: predicts returns and trains on the same batches as the policy."""

from functools import partial

import torch
from torch import Tensor

from services.common.runspec.run import RunSpec
from services.trainer.algorithm import loss
from services.trainer.batch.packing import pack
from services.trainer.batch.plan import StepPlan
from services.trainer.batch.samples import Samples, idle_samples
from services.trainer.collectives import MetricTotals, Ranks
from services.trainer.engines.fsdp import optim
from services.trainer.engines.fsdp.oom import Fitting, Micros, OomLimits, fitting, oom_in
from services.trainer.engines.fsdp.parallel import begin_micro_batch
from services.trainer.engines.fsdp.scorer import score_tokens
from services.trainer.model.policy import Critic, trainable
from services.trainer.steps.gradients import num_counted


class CriticRunner:
    """Scores responses with the critic and trains it.

    Args:
        critic: The critic, wrapped for its parallelism.
        spec: The run.
        ranks: Data-parallel ranks.
        device: Device of the critic.
        oom_limits: Micro-batch sizes that are known to exceed memory.
    """

    def __init__(
        self,
        critic: Critic,
        *,
        spec: RunSpec,
        ranks: Ranks,
        device: torch.device,
        oom_limits: OomLimits | None = None,
    ) -> None:
        self.critic = critic
        self._spec = spec
        self._ranks = ranks
        self._device = device
        self._parameters = trainable(critic)
        own_rate = spec.critic.learning_rate
        changes = {} if own_rate is None else {"learning_rate": own_rate}
        self._schedule = spec.trainer.optimizer.model_copy(update=changes)
        in_host = spec.trainer.cpu_offload == "optimizer"
        self.optimizer = optim.build_optimizer(critic, self._schedule, in_host=in_host)
        self.oom_limits = oom_limits or oom_in(spec.trainer)
        self._fitting = Fitting(critic, spec, device=device, oom_limits=self.oom_limits)
        self.num_updates = 0

    def values(self, samples: Samples, plan: StepPlan) -> Tensor:
        """Returns ``[R]`` float32 values on the CPU, from the critic at the start of the step."""
        return score_tokens(
            self.critic,
            self.critic,
            samples,
            plan,
            device=self._device,
            shares_prefixes=self._spec.shares_prefixes,
            oom_limits=self.oom_limits,
        )

    def update(
        self,
        samples: Samples,
        work: Micros,
        *,
        tally: MetricTotals,
        num_steps: int,
    ) -> bool:
        """Runs one optimizer update towards ``returns``; returns False if the gradient is not finite.

        The update is skipped if the gradient is not finite or if no token trains.

        Args:
            samples: This rank's samples, with ``values`` and ``returns``.
            work: Positions of the sequences of each micro-batch.
            tally: Receives the reported terms.
            num_steps: Steps of the whole run.
        """
        self._fitting.begin()
        found, _ = self._fitting.fitted(partial(self._add, samples), samples, work)
        if found is None:
            return True
        tally.merge(found)
        left_out = torch.tensor([float(len(self._fitting.left_out))])
        tally.max("critic_left_out_sequences", left_out, torch.ones(1, dtype=torch.bool))
        norm = optim.gradient_norm(self._parameters)
        if is_finite := bool(torch.isfinite(norm)):
            self.num_updates += 1
            trainer = self._spec.trainer
            rate = optim.learning_rate(
                self._schedule,
                update=self.num_updates,
                num_updates=num_steps * trainer.updates_per_step,
            )
            optim.set_learning_rate(self.optimizer, rate)
            optim.clip_gradients(self._parameters, norm, self._spec.trainer.optimizer.max_grad_norm)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return is_finite

    def _add(self, samples: Samples, work: Micros) -> MetricTotals | None:
        """Accumulates the gradients of micro-batches; returns the metrics, or None if no token trains."""
        totals = num_counted(samples.tokens["loss_mask"], samples, work, self._ranks)
        if not totals[0]:
            return None
        tally = MetricTotals()
        tokens, sequences = totals.to(self._device).unbind()
        denominators = loss.Denominators(tokens=tokens, sequences=sequences, horizon=1)
        for number, micro in enumerate(work):
            is_last = number + 1 == len(work)
            begin_micro_batch(self.critic, is_last=is_last, spec=self._spec.trainer)
            part = samples.select(micro) if micro else idle_samples()
            columns = part.to(self._device).tokens
            mask = columns["loss_mask"]
            with fitting(number):
                error = loss.value_loss(
                    torch.where(mask, self._forward(part), 0.0),
                    columns["values"],
                    columns["returns"],
                    clip=self._spec.algorithm.value_clip,
                )
                share = loss.aggregate(
                    error.values,
                    mask,
                    part.segments.to(self._device),
                    mode="token-mean",
                    denominators=denominators,
                )
                (share * self._ranks.size).backward()
            tally.mean("value_loss", error.values, mask)
            for name, indicator in error.indicators.items():
                tally.mean(name, indicator, mask)
        return tally

    def _forward(self, samples: Samples) -> Tensor:
        packed = pack(
            samples.prompts,
            samples.responses,
            device=self._device,
            shares_prefixes=self._spec.shares_prefixes,
        )
        values: Tensor = self.critic(packed)
        return values
