"""Training step of a critic that has its own processes, on the same batch as the policy's step."""

import time
from collections.abc import Mapping

import torch
from torch import nn

from services.common.runspec.run import RunSpec
from services.trainer.batch.plan import StepPlan
from services.trainer.batch.samples import BatchFacts, Samples
from services.trainer.collectives import MetricTotals, Ranks
from services.trainer.engines.fsdp.scorer import without_unscored
from services.trainer.steps.credit import CreditAssigner
from services.trainer.steps.critic import CriticRunner
from services.trainer.steps.step import StepResult


class CriticStepRunner:
    """Trains the critic on one batch after another, towards the returns that the policy is trained with.

    Args:
        critic: Scores and trains the critic.
        spec: The run.
        ranks: The critic's data-parallel ranks.
    """

    def __init__(self, critic: CriticRunner, *, spec: RunSpec, ranks: Ranks) -> None:
        self.critic = critic
        self.oom_limits = critic.oom_limits
        self.num_steps = spec.trainer.steps or 1
        self._spec = spec
        self._ranks = ranks
        self._credit = CreditAssigner(
            spec.algorithm, ranks, max_response_tokens=spec.rollout.max_response_tokens
        )

    def run(
        self, weight_version: int, samples: Samples, cohort: BatchFacts, plan: StepPlan
    ) -> StepResult:
        """Trains one batch.

        Args:
            weight_version: Version of the policy's weights that the step starts from.
            samples: This rank's samples, with the ``values`` that the critic computed before.
            cohort: The whole batch.
            plan: This rank's work.
        """
        begin, tally = time.perf_counter(), MetricTotals()
        samples, plan = without_unscored(samples, plan)
        left_out = torch.tensor([float(len(plan.left_out))])
        tally.max("critic_left_out_sequences", left_out, torch.ones(1, dtype=torch.bool))
        credit = self._credit(samples, cohort, kl_coefficient=0.0)
        assert credit.returns is not None, "an advantage with a critic gives its targets"
        samples = samples.with_tokens(returns=credit.returns)
        applied = [
            self.critic.update(samples, work, tally=tally, num_steps=self.num_steps)
            for work in plan.updates
        ]
        metrics = tally.reduce(self._ranks)
        metrics["seconds_critic"] = time.perf_counter() - begin
        metrics["nonfinite_critic"] = float(applied.count(False))
        return StepResult(metrics=metrics, skipped=not any(applied))

    def parts(self) -> dict[str, tuple[nn.Module, torch.optim.AdamW]]:
        """Returns the critic with its optimizer, by the prefix of its parameter names."""
        return {"critic.": (self.critic.critic, self.critic.optimizer)}

    def facts(self) -> dict[str, float]:
        """Returns the numbers that a checkpoint stores besides the tensors."""
        return {"critic.num_updates": self.critic.num_updates}

    def restore(self, facts: Mapping[str, float]) -> None:
        """Restores the numbers of a checkpoint."""
        self.critic.num_updates = int(facts["critic.num_updates"])
