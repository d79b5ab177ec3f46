"""The critic of GAE: predicts returns and trains on the same batches as the policy."""

import torch
from torch import Tensor

from services.common.runspec.algorithm import AlgorithmSpec
from services.common.runspec.run import RunSpec
from services.trainer.algorithm.loss import Denominators, aggregate, value_loss
from services.trainer.batch.samples import Samples
from services.trainer.collectives import MetricTotals
from services.trainer.engines.base import Micros, TrainEngine
from services.trainer.steps.objective import num_counted
from services.trainer.steps.updates import Outcome, Updates


class ValueLoss:
    """Loss of one update of the critic.

    Args:
        totals: ``[2]`` tokens and sequences that train in the update, over all ranks.
    """

    def __init__(self, spec: AlgorithmSpec, totals: Tensor) -> None:
        self.tally = MetricTotals()
        self.totals = totals
        self._spec = spec

    def weight(self, samples: Samples) -> Tensor:
        """Returns the micro-batch's share of the tokens that train."""
        return samples.tokens["loss_mask"].sum() / self.totals[0].clamp(min=1)

    def __call__(
        self,
        samples: Samples,
        scores: Tensor,
        entropy: Tensor | None = None,
        divergence: Tensor | None = None,
    ) -> Tensor:
        """Returns a micro-batch's share of the loss."""
        device = scores.device
        columns, (tokens, sequences) = samples.to(device).tokens, self.totals.to(device).unbind()
        mask = columns["loss_mask"]
        error = value_loss(
            torch.where(mask, scores, 0.0),
            columns["values"],
            columns["returns"],
            clip=self._spec.value_clip,
        )
        self.tally.mean("value_loss", error.values, mask)
        for name, indicator in error.indicators.items():
            self.tally.mean(name, indicator, mask)
        return aggregate(
            error.values,
            mask,
            samples.segments.to(device),
            mode="token-mean",
            denominators=Denominators(tokens=tokens, sequences=sequences, horizon=1),
        )


class CriticRunner:
    """Trains the critic."""

    def __init__(self, engine: TrainEngine, *, spec: RunSpec) -> None:
        self.engine = engine
        self._spec = spec
        own_rate = spec.critic.learning_rate
        changes = {} if own_rate is None else {"learning_rate": own_rate}
        self.updates = Updates(
            engine, spec.trainer.optimizer.model_copy(update=changes), trainer=spec.trainer
        )

    def update(
        self, samples: Samples, work: Micros, *, tally: MetricTotals, num_steps: int
    ) -> Outcome:
        """Runs one optimizer update towards ``returns``; returns its outcome. All ranks must call it.

        The update is skipped if loss or gradient is not finite. It is also skipped, with the outcome
        ``applied``, if no token trains or no micro-batch fits into memory.

        Args:
            samples: This rank's samples, with ``values`` and ``returns``.
            num_steps: Steps of the whole run.
        """
        mask, ranks = samples.tokens["loss_mask"], self.engine.ranks
        if not num_counted(mask, samples, work, ranks)[0]:
            return "applied"

        def make_loss(micros: Micros) -> ValueLoss:
            return ValueLoss(self._spec.algorithm, num_counted(mask, samples, micros, ranks))

        passes = self.engine.forward_backward(
            samples, work, make_loss, loss_scale=self.updates.loss_scale
        )
        if not passes.loss_of.totals[0]:  # nothing fitted into memory
            self.engine.optimizer_step(None)
            return "applied"
        tally.merge(passes.loss_of.tally)
        left_out = torch.tensor([float(len(passes.left_out))])
        tally.max("critic_left_out_sequences", left_out, torch.ones(1, dtype=torch.bool))
        loss = ranks.sum(passes.loss.reshape(1).double()).item()
        return self.updates.apply(moves=True, loss=loss, num_steps=num_steps).outcome
