"""Finds the bottleneck of a run and predicts which changes of its settings would help.

The prediction for the run as it is must agree with its measurement; otherwise no change is advised.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from services.extras.planner.inputs import (
    Rates,
    Setting,
    Step,
    idle_fraction,
    measured_step_s,
    representative_steps,
    waited_fraction,
)
from services.extras.planner.simulation import Prediction, predict

MAX_ERROR = 0.15
"""Max relative error of the prediction for the run as it is."""
_MIN_GAIN = 1.05
_MAX_CHANGES = 3
_BOUNDS = (1, 2, 4, 8)
_SIMULATED_STEPS = 16
_LOW_WAIT = 0.1
Bottleneck = Literal["generation", "training", "neither"]
_REMEDIES: Mapping[Bottleneck, frozenset[str]] = {
    "generation": frozenset({"rollouts", "slots", "max_staleness"}),
    "training": frozenset({"trainer_gpus"}),
    "neither": frozenset({"max_staleness"}),
}
"""Parts of a setting that help the side that is the bottleneck."""

_NAMES = {
    "rollouts": "rollout.replicas",
    "max_staleness": "algorithm.max_staleness",
    "slots": "rollout.max_running_samples",
    "trainer_gpus": "trainer.world_size",
}
"""Key of the specification for each part of a setting that may be advised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Change of one setting."""

    key: str
    before: int
    after: int
    gain: float
    """Predicted samples per second, relative to the current setting."""

    def __str__(self) -> str:
        return f"{self.key}={self.after} (now {self.before}): {self.gain:.2g}x throughput"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Result of the analysis."""

    bottleneck: Bottleneck
    waited: float
    """Fraction of the time in which the trainer waited for samples."""
    idled: float
    """Fraction of the time in which the rollouts had nothing to generate."""
    measured_step_s: float
    now: Prediction | None
    """Prediction for the run as it is; None if its rates are unknown."""
    changes: tuple[Change, ...]
    """Changes that would help, the best first; empty if the prediction is off."""
    placement: str
    """Current ``topology.placement``."""
    placement_gains: Mapping[str, float] = field(default_factory=dict)
    """Predicted samples per second of the other placements on the same GPUs, relative to the
    current one."""

    @property
    def error(self) -> float:
        """Relative error of the predicted step time of the run as it is; NaN without a prediction.

        0.1 means a prediction that is 10 % too long.
        """
        return math.nan if self.now is None else self.now.step_s / self.measured_step_s - 1

    @property
    def both_waited(self) -> float:
        """Lower bound of the fraction of the time in which both sides waited, so not for each other."""
        return max(0.0, self.waited + self.idled - 1)

    @property
    def is_trusted(self) -> bool:
        """True if the prediction for the run as it is agrees with its measurement.

        The prediction does not model rewards, tools and environments, so it may agree by chance if both
        sides wait for them.
        """
        return abs(self.error) <= MAX_ERROR and self.both_waited < _LOW_WAIT

    def message(self) -> str:
        """Returns the side that waits and the remedy, as text for people."""
        times = f"the trainer waited for samples {100 * self.waited:.0f} % of the time"
        idle = f"the rollouts were idle {100 * self.idled:.0f} %"
        if self.placement == "colocated":
            text = f"Trainer and rollouts share GPUs: {times}."
        elif self.bottleneck == "generation":
            text = f"Rollouts are the bottleneck: {times}, {idle}."
        elif self.bottleneck == "training":
            text = f"The trainer is the bottleneck: {times}, {idle}."
        elif self.waited < _LOW_WAIT:
            text = f"Trainer and rollouts are balanced: {times}, {idle}."
        elif self.both_waited < _LOW_WAIT:
            text = f"Trainer and rollouts wait for each other: {times}, {idle}."
        else:
            text = (
                "Trainer and rollouts wait at once, for rewards, tools, environments or overhead: "
                f"{times}, {idle}."
            )
        if self.both_waited >= _LOW_WAIT:
            return (
                f"{text} No change is advised: predictions include neither rewards nor tools nor "
                "environments."
            )
        if self.now is None:
            return f"{text} No change is advised: the run's rates have not been measured yet."
        if not self.is_trusted:
            return (
                f"{text} No change is advised: the predicted step time differs from the measured "
                f"{self.measured_step_s:.2f} s by {100 * self.error:+.0f} %."
            )
        return f"{text} {self.remedy()}"

    def remedy(self) -> str:
        """Returns the helpful changes as text for people; empty if the prediction is off."""
        if not self.is_trusted:
            return ""
        sentences = []
        if self.changes:
            sentences.append(f"Predicted: {'; '.join(map(str, self.changes))}.")
        elif max(self.placement_gains.values(), default=0.0) < _MIN_GAIN:
            sentences.append(
                f"No change of a setting would give more than {_MIN_GAIN:.2f}x throughput."
            )
        if self.placement_gains:
            gains = " and ".join(
                f"{name} {gain:.2g}x" for name, gain in self.placement_gains.items()
            )
            sentences.append(
                f"Predicted for other placements than {self.placement} on the same GPUs: {gains}."
            )
        return " ".join(sentences)

    @property
    def first(self) -> tuple[object, ...]:
        """Most important findings: the advice is reported again when they differ."""
        better = {name: gain for name, gain in self.placement_gains.items() if gain >= _MIN_GAIN}
        placement = max(better, key=lambda name: better[name], default="")
        return (
            self.bottleneck,
            placement,
            *((change.key, change.after) for change in self.changes[:1]),
        )


def advise(
    steps: Sequence[Step],
    rates: Rates | None,
    setting: Setting,
    *,
    candidates: Iterable[Setting] = (),
    gpus: int | None = None,
    allows: Callable[[Setting], bool] = lambda _: True,
    slots: Callable[[int], int] | None = None,
) -> Advice:
    """Analyzes the newest steps of a run. Takes up to a second of processor time.

    Args:
        steps: Metrics of the steps, in order.
        rates: Rates that the steps have; None if a metric is missing. No change is advised without them.
        candidates: The same setting in other placements, on the same GPUs.
        gpus: Number of GPUs that trainer and rollouts may use; None if only their current ones are
            known. No change that needs more is advised.
        allows: Returns False for a setting that the specification's rules reject; it is not advised.
        slots: Returns the slots of a rollout at a staleness bound; None if they do not depend on it.

    Raises:
        TooFewStepsError: If there are too few steps.
    """
    share, idle_share = waited_fraction(steps), idle_fraction(steps)
    step_s = measured_step_s(representative_steps(steps))
    now = None if rates is None else predict(rates, setting, num_steps=_SIMULATED_STEPS)
    advice = Advice(
        bottleneck=_bottleneck(share, idle_share) if setting.dedicated_rollouts else "neither",
        waited=share,
        idled=idle_share,
        measured_step_s=step_s,
        now=now,
        changes=(),
        placement=setting.placement,
    )
    if rates is None or now is None or not advice.is_trusted:
        return advice
    spare = 0 if gpus is None else gpus - setting.gpus
    found_changes = _changes(
        rates,
        setting,
        now,
        bottleneck=advice.bottleneck,
        spare_gpus=spare,
        allows=allows,
        slots=slots,
    )
    changes = sorted(found_changes, key=lambda change: -change.gain)
    helpful = [change for change in changes if change.gain >= _MIN_GAIN]
    # If the run needs more GPUs than there are, its workers share GPUs or have none, and other placements
    # are not predicted: their workers would, too.
    gains: dict[str, float] = {
        candidate.placement: _gain(rates, candidate, now) for candidate in candidates if spare >= 0
    }
    return replace(advice, changes=tuple(helpful[:_MAX_CHANGES]), placement_gains=gains)


def _bottleneck(waited_share: float, idle_share: float) -> Bottleneck:
    """Returns the side that the other one waits for; "neither" if both or none wait."""
    if waited_share < _LOW_WAIT:
        return "training" if idle_share >= _LOW_WAIT else "neither"
    return "generation" if idle_share <= waited_share / 2 else "neither"


def _changes(
    rates: Rates,
    setting: Setting,
    now: Prediction,
    *,
    bottleneck: Bottleneck,
    spare_gpus: int,
    allows: Callable[[Setting], bool],
    slots: Callable[[int], int] | None,
) -> Iterator[Change]:
    """Yields one change for each part of the setting that can be changed alone: the best value tried."""
    values_by_name: dict[str, list[int]] = {
        "rollouts": [setting.rollouts + 1] if spare_gpus >= setting.engine_gpus else [],
        "trainer_gpus": [2 * setting.trainer_gpus] if spare_gpus >= setting.trainer_gpus else [],
        "slots": [2 * setting.slots],
        "max_staleness": [bound for bound in _BOUNDS if bound > setting.max_staleness][:2],
    }
    if setting.is_colocated:  # trainer and rollouts can only get GPUs together
        del values_by_name["trainer_gpus"]
    if not setting.dedicated_rollouts:
        del values_by_name["rollouts"]
        values_by_name["max_staleness"] = [1] if setting.max_staleness < 1 else []
    # If all rollouts are colocated, no side is the bottleneck, and any helpful change counts.
    helps = _REMEDIES[bottleneck] if setting.dedicated_rollouts else frozenset(values_by_name)
    for name, values in values_by_name.items():
        if name not in helps:
            continue
        gains = {}
        for value in values:
            changed_setting = replace(setting, **{name: value})  # type: ignore[arg-type]
            if not allows(changed_setting):
                continue
            if name == "max_staleness":
                changed_setting = replace(
                    changed_setting,
                    slots=setting.slots if slots is None else slots(value),
                    partial_rollout=True,
                    accumulate_early=False,
                )
            gains[value] = _gain(rates, changed_setting, now)
        if gains:
            best = max(gains, key=lambda value: gains[value])
            # Takes the smallest value with nearly the best gain.
            after = min(value for value, gain in gains.items() if gain >= 0.97 * gains[best])
            yield Change(
                key=_NAMES[name],
                before=getattr(setting, name),
                after=after,
                gain=gains[after],
            )


def _gain(rates: Rates, setting: Setting, now: Prediction) -> float:
    prediction = predict(rates, setting, num_steps=_SIMULATED_STEPS)
    return prediction.samples_per_s / now.samples_per_s
