"""Updates of a model on its learning-rate schedule."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from services.common.runspec.trainer import OptimizerSpec, TrainerSpec
from services.trainer.checkpoint.compatibility import counter
from services.trainer.engines.base import OptimizerStep, TrainEngine
from services.trainer.steps.loss_scale import LossScale

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


Outcome = Literal["applied", "overflow", "not_finite"]
"""Outcome of an update; all but the first leave weights, optimizer state and schedule unchanged."""


@dataclass(frozen=True, slots=True)
class AppliedUpdate:
    """An update, or why there was none."""

    outcome: Outcome
    taken: OptimizerStep
    learning_rate: float
    """Learning rate that was applied; 0 if none was."""


class Updates:
    """Counts the optimizer updates of a model, and schedules their learning rates and loss scales.

    Args:
        optimizer: Peak, warm-up and shape of the learning rate.
        trainer: Updates of a step, and loss scaling.
    """

    def __init__(
        self, engine: TrainEngine, optimizer: OptimizerSpec, *, trainer: TrainerSpec
    ) -> None:
        self._engine = engine
        self._spec = optimizer
        self._updates_per_step = trainer.updates_per_step
        self._scale = LossScale(trainer.loss_scale) if trainer.dtype == "float16" else None
        self.count = 0

    @property
    def loss_scale(self) -> float:
        """Factor of the loss in backward passes until the next update."""
        return 1.0 if self._scale is None else self._scale.value

    def apply(
        self, *, moves: bool, loss: float, num_steps: int, scale: Tensor | None = None
    ) -> AppliedUpdate:
        """Updates the weights with the accumulated gradients, unless these are not finite.

        All ranks must call it.

        Args:
            moves: True if weights may change; otherwise the gradients are only measured.
            loss: Loss of the update over all ranks; if it is not finite, the weights do not change.
            num_steps: Steps of the whole run.
            scale: Scalar that multiplies the gradients first.

        Raises:
            NotFiniteError: If the gradients overflowed in float16 at the lowest loss scale.
        """
        rate, is_finite = 0.0, math.isfinite(loss)
        if moves and is_finite:
            rate = learning_rate(
                self._spec,
                update=self.count + 1,
                num_updates=num_steps * self._updates_per_step,
            )
        if self._scale is not None:
            scale = (torch.ones(()) if scale is None else scale) / self._scale.value
        taken = self._engine.optimizer_step(rate, scale=scale)
        self.count += taken.moved
        outcome: Outcome = "applied"
        if not is_finite:
            outcome = "not_finite"  # a lower scale would not help
        elif not math.isfinite(taken.grad_norm):
            outcome = "not_finite" if self._scale is None else "overflow"
        if self._scale is not None and outcome == "overflow":
            self._scale.back_off()
        elif self._scale is not None and taken.moved:
            self._scale.grow()
        return AppliedUpdate(outcome, taken, rate if taken.moved else 0.0)

    def describe_scale(self, outcomes: Sequence[Outcome], prefix: str = "") -> dict[str, float]:
        """Returns the metrics of loss scaling after a step; none if the loss is not scaled."""
        if self._scale is None:
            return {}
        return {
            f"{prefix}loss_scale": self._scale.value,
            f"{prefix}overflow_updates": float(outcomes.count("overflow")),
        }

    def facts(self, part: str) -> dict[str, float]:
        """Returns the numbers that a checkpoint stores, with the names for an engine's subfolder."""
        scale = {} if self._scale is None else self._scale.facts(part)
        return {counter(part): self.count, **scale}

    def restore(self, facts: Mapping[str, float], part: str) -> None:
        """Restores the numbers of a checkpoint."""
        self.count = int(facts[counter(part)])
        if self._scale is not None:
            self._scale.restore(facts, part)
