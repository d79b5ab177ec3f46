"""Updates of a model: learning-rate schedule, loss scale of float16, and the limit of skipped steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from services.common.errors import InternalError
from services.common.runspec.trainer import LossScaleSpec, OptimizerSpec, TrainerSpec
from services.trainer.batch.columns import is_checked
from services.trainer.batch.samples import BatchFacts, Samples
from services.trainer.checkpoint.compatibility import counter
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
    progress = min(1.0, (update - spec.warmup_steps) / length)
    decay = (
        1.0 - progress if spec.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    )
    return spec.learning_rate * (_FINAL_FRACTION + (1.0 - _FINAL_FRACTION) * decay)


Outcome = Literal["applied", "overflow", "not_finite"]
"""Outcome of an update; all but the first leave weights, optimizer state and schedule unchanged."""


@dataclass(frozen=True, slots=True)
class AppliedUpdate:
    """Result of an update, which may have been skipped."""

    outcome: Outcome
    optimizer_step: OptimizerStep
    learning_rate: float
    """Learning rate that was applied; 0 if no weights changed."""


_SCALE_FACTOR: Final = 2.0
_MIN_SCALE: Final = 1.0


class LossScale:
    """Dynamic loss scaling of float16, with the rules of ``torch.amp.GradScaler``; the same on all ranks.

    Gradients below 6e-8 are 0 in float16, and those above 65,504 are infinite. The loss is multiplied by the
    scale before the backward pass, and the float32 gradients are divided by it before they are clipped.
    The norm over all ranks, by which gradients are clipped, also shows an overflow on any rank.
    ``GradScaler`` would check all gradients once more, and leaves the skipping to fused kernels that Muon
    and offloaded moments do not have.
    """

    def __init__(self, spec: LossScaleSpec) -> None:
        self.value = spec.initial
        self._growth_interval = spec.growth_interval
        self._num_updates = 0

    def grow(self) -> None:
        """Counts an update without overflow."""
        self._num_updates += 1
        if self._num_updates == self._growth_interval:
            self.value, self._num_updates = self.value * _SCALE_FACTOR, 0

    def back_off(self) -> None:
        """Lowers the scale after an overflow.

        Raises:
            NotFiniteError: If the scale would fall below 1.
        """
        if self.value / _SCALE_FACTOR < _MIN_SCALE:
            raise NotFiniteError(
                f"gradients overflow in float16 even at loss scale {self.value:g}, to which overflows have "
                "lowered it; set trainer.dtype to bfloat16, or lower "
                "trainer.optimizer.learning_rate"
            )
        self.value, self._num_updates = self.value / _SCALE_FACTOR, 0

    def facts(self, folder_name: str) -> dict[str, float]:
        """Returns the state for a checkpoint, with the names for an engine's subfolder."""
        return dict(zip(_scale_names(folder_name), (self.value, self._num_updates), strict=True))

    def restore(self, facts: Mapping[str, float], folder_name: str) -> None:
        """Restores the state of a checkpoint; does nothing if its run had another dtype and stored none."""
        scale, updates = _scale_names(folder_name)
        if scale in facts:
            self.value, self._num_updates = float(facts[scale]), int(facts[updates])


def _scale_names(folder_name: str) -> tuple[str, str]:
    prefix = f"{folder_name}." if folder_name else ""
    return f"{prefix}loss_scale", f"{prefix}loss_scale_updates"


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
                self._spec, update=self.count + 1, num_updates=num_steps * self._updates_per_step
            )
        if self._scale is not None:
            scale = (torch.ones(()) if scale is None else scale) / self._scale.value
        step = self._engine.optimizer_step(rate, scale=scale)
        self.count += step.moved
        outcome: Outcome = "applied"
        if not is_finite:
            outcome = "not_finite"  # a lower scale would not help
        elif not math.isfinite(step.grad_norm):
            outcome = "not_finite" if self._scale is None else "overflow"
        if self._scale is not None and outcome == "overflow":
            self._scale.back_off()
        elif self._scale is not None and step.moved:
            self._scale.grow()
        return AppliedUpdate(outcome, step, rate if step.moved else 0.0)

    def describe_scale(self, outcomes: Sequence[Outcome], prefix: str = "") -> dict[str, float]:
        """Returns the metrics of loss scaling after a step; none if the loss is not scaled."""
        if self._scale is None:
            return {}
        return {
            f"{prefix}loss_scale": self._scale.value,
            f"{prefix}overflow_updates": float(outcomes.count("overflow")),
        }

    def facts(self, folder_name: str) -> dict[str, float]:
        """Returns the numbers that a checkpoint stores, with the names for an engine's subfolder."""
        scale = {} if self._scale is None else self._scale.facts(folder_name)
        return {counter(folder_name): self.count, **scale}

    def restore(self, facts: Mapping[str, float], folder_name: str) -> None:
        self.count = int(facts[counter(folder_name)])
        if self._scale is not None:
            self._scale.restore(facts, folder_name)


class NotFiniteError(InternalError):
    """Too many consecutive steps had a number that is not finite."""

    reason = "NOT_FINITE"


@dataclass(slots=True)
class NonFiniteGuard:
    """Limits the number of consecutive skipped steps.

    Args:
        suspects: Likely causes besides the learning rate and rewards, for the message.
    """

    max_skipped: int
    suspects: tuple[str, ...] = ()
    first_skipped: int = 0
    """First of the newest consecutive skipped steps; 0 if the newest step was not skipped."""
    num_skipped: int = 0
    """Consecutive skipped steps, since the last return to a checkpoint."""
    has_rewound: bool = False

    def must_rewind(self, step: int, *, skipped: bool) -> bool:
        """Counts a step; returns True if too many were skipped, so that a checkpoint must be restored.

        The checkpoint must be of a step before :attr:`first_skipped`: later ones hold the same weights.

        Raises:
            NotFiniteError: If going back to that checkpoint did not help before.
        """
        if not skipped:
            self.first_skipped, self.num_skipped, self.has_rewound = 0, 0, False
            return False
        self.first_skipped = self.first_skipped or step
        self.num_skipped += 1
        if self.num_skipped <= self.max_skipped:
            return False
        if self.has_rewound:
            raise self.failure(step, since="the last good checkpoint was loaded")
        self.num_skipped, self.has_rewound = 0, True
        return True

    def failure(self, step: int, *, since: str) -> NotFiniteError:
        """Returns the error that ends the run at ``step``."""
        return NotFiniteError(
            f"step {step} has a number that is not finite, like all steps since {since}; lower "
            "trainer.optimizer.learning_rate, or check "
            f"{' and '.join((*self.suspects, 'the rewards'))}",
            step=step,
        )


def nonfinite_inputs(samples: Samples, facts: BatchFacts) -> tuple[str, ...]:
    """Returns the names of inputs that are not finite where they count: ``rewards`` and columns."""
    member = facts.is_member[samples.rows]
    # A greedy response is not a member of its group, but the baseline of the members.
    rewarded = member | facts.is_greedy[samples.rows]
    names = [] if bool(torch.isfinite(samples.rewards[rewarded]).all()) else ["rewards"]
    # Untrained tokens may count too, because the rewards of trained tokens may depend on them.
    mask = samples.tokens["response_mask"] & samples.segments.expand(member)
    names += [
        name
        for name, column in samples.tokens.items()
        if is_checked(name) and not bool(torch.isfinite(column[mask]).all())
    ]
    return tuple(names)
