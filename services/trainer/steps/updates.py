"""Updates of a model on its learning-rate schedule."""

import math

from torch import Tensor

from services.common.runspec.trainer import OptimizerSpec
from services.trainer.engines.base import OptimizerStep, TrainEngine

_FINAL_FRACTION = 0.1


def learning_rate(spec: OptimizerSpec, *, update: int, num_updates: int) -> float:
    """Returns the learning rate of an update.

    Args:
        spec: Peak, warm-up and shape.
        update: Number of the update, from 1.
        num_updates: Updates of the whole run.
    """
    if update <= spec.warmup_steps:
        return spec.learning_rate * update / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.learning_rate
    length = max(1, num_updates - spec.warmup_steps)
    done = min(1.0, (update - spec.warmup_steps) / length)
    left = 1.0 - done if spec.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return spec.learning_rate * (_FINAL_FRACTION + (1.0 - _FINAL_FRACTION) * left)


class Updates:
    """Counts the optimizer updates of a model and schedules their learning rates.

    Args:
        spec: Peak, warm-up and shape of the learning rate.
    """

    def __init__(self, engine: TrainEngine, spec: OptimizerSpec, *, updates_per_step: int) -> None:
        self._engine = engine
        self._spec = spec
        self._updates_per_step = updates_per_step
        self.count = 0

    def apply(
        self, *, moves: bool, num_steps: int, scale: Tensor | None = None
    ) -> tuple[OptimizerStep, float]:
        """Updates the weights with the accumulated gradients, unless these are not finite.

        All ranks must call it.

        Args:
            moves: True if weights may change; otherwise the gradients are only measured.
            num_steps: Steps of the whole run.
            scale: Scalar that multiplies the gradients first.

        Returns:
            The outcome, and the learning rate that was applied; 0 if none was.
        """
        rate = 0.0
        if moves:
            rate = learning_rate(
                self._spec,
                update=self.count + 1,
                num_updates=num_steps * self._updates_per_step,
            )
        taken = self._engine.optimizer_step(rate, scale=scale)
        self.count += taken.moved
        return taken, rate if taken.moved else 0.0
