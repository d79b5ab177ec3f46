"""Training step of a critic that has its own processes, on the same batch as the policy's step."""

import time
from collections.abc import Mapping

import torch

from services.common.errors import FailedPreconditionError
from services.common.runspec.run import RunSpec
from services.trainer.batch.plan import StepPlan
from services.trainer.batch.samples import BatchFacts, Samples
from services.trainer.collectives import MetricTotals
from services.trainer.engines.base import TrainEngine
from services.trainer.steps.credit import CreditAssigner
from services.trainer.steps.critic import CriticRunner
from services.trainer.steps.step import StepResult, without_unscored


class CriticStepRunner:
    """Trains the critic on one batch after another, towards the returns that the policy is trained with."""

    def __init__(self, critic: CriticRunner, *, spec: RunSpec) -> None:
        self.critic = critic
        self.engine = critic.engine
        self.num_steps = spec.trainer.steps or 1
        self._spec = spec
        self._credit = CreditAssigner(
            spec.algorithm, self.engine.ranks, max_response_tokens=spec.rollout.max_response_tokens
        )

    def run(
        self, weight_version: int, samples: Samples, cohort: BatchFacts, plan: StepPlan
    ) -> StepResult:
        """Trains one batch.

        Args:
            weight_version: Version of the policy's weights that the step starts from.
            samples: This rank's samples, with the ``values`` that the critic computed before.
        """
        begin, tally = time.perf_counter(), MetricTotals()
        samples, plan = without_unscored(samples, plan)
        left_out = torch.tensor([float(len(plan.left_out))])
        tally.max("critic_left_out_sequences", left_out, torch.ones(1, dtype=torch.bool))
        credit = self._credit(samples, cohort, kl_coefficient=0.0)
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
        self, weight_version: int, samples: Samples, cohort: BatchFacts, plan: StepPlan
    ) -> None:
        """Raises, because the critic's targets are those of a whole batch.

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
        """Returns the numbers that a checkpoint stores besides the tensors."""
        return self.critic.updates.facts("")

    def restore(self, facts: Mapping[str, float]) -> None:
        self.critic.updates.restore(facts, "")
