"""Which side of a run is short, and what would mend it: predicted, and never without a check.

What is predicted for the run as it is must agree with what was measured of it; otherwise nothing is promised.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from services.controller.planning.measured import (
    Step,
    idled,
    measured_step_s,
    settled,
    waited,
)
from services.controller.planning.rates import Rates, Setting
from services.controller.planning.simulation import Prediction, predict

LARGEST_ERROR = 0.15
"""By how much a prediction may be off for the run as it is."""
_LEAST_GAIN = 1.05
_MOST_CHANGES = 3
_BOUNDS = (1, 2, 4, 8)
_SIMULATED_STEPS = 16
_WAITS_LITTLE = 0.1
Short = Literal["generation", "training", "neither"]
_REMEDIES: Mapping[Short, frozenset[str]] = {
    "generation": frozenset({"rollouts", "places", "max_staleness"}),
    "training": frozenset({"trainer_gpus"}),
    "neither": frozenset({"max_staleness"}),
}
"""Parts of a setting that help the side that is short."""

_NAMES = {
    "rollouts": "rollout.replicas",
    "max_staleness": "algorithm.max_staleness",
    "places": "rollout.max_running_samples",
    "trainer_gpus": "trainer.world_size",
}
"""Key of the specification for each part of a setting that may be advised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing that could be set otherwise."""

    key: str
    before: int
    after: int
    gain: float
    """Samples per second, over those of now."""

    def __str__(self) -> str:
        return f"{self.key} {self.after} instead of {self.before} would give {self.gain:.2g}x"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What was found."""

    short: Short
    waited: float
    """Part of the time in which the trainer waited for samples."""
    idled: float
    """Part of the time in which the rollouts had nothing to generate."""
    measured_step_s: float
    now: Prediction
    changes: tuple[Change, ...]
    """Those that would help, the best first; none where the prediction is off."""
    placement: str
    """``topology.placement`` as it is."""
    others: Mapping[str, float] = field(default_factory=dict)
    """What the other placements would give on the same GPUs: samples per second, over those of now."""

    @property
    def error(self) -> float:
        """By how much the prediction of the run as it is is off; 0.1 is 10 % too long."""
        return self.now.step_s / self.measured_step_s - 1

    @property
    def is_trusted(self) -> bool:
        """Whether the prediction of the run as it is agrees with it."""
        return abs(self.error) <= LARGEST_ERROR

    def message(self) -> str:
        """Return the side that waits, and what would mend it, for a person."""
        times = f"the trainer waited {100 * self.waited:.0f} % of the time for samples"
        idle = f"the rollouts were idle {100 * self.idled:.0f} %"
        if self.placement == "colocated":
            text = f"Trainer and rollouts take turns: {times}."
        elif self.short == "generation":
            text = f"Rollouts are the bottleneck: {times}."
        elif self.short == "training":
            text = f"The trainer is the bottleneck: {times}, {idle}."
        elif self.waited < _WAITS_LITTLE:
            text = f"Trainer and rollouts are in balance: {times}, {idle}."
        else:
            text = f"Trainer and rollouts wait for each other: {times}, {idle}."
        if not self.is_trusted:
            return (
                f"{text} No change is advised: the prediction for the run as it is is "
                f"{100 * self.error:+.0f} % off (steps of {self.measured_step_s:.2f} s)."
            )
        return f"{text} {self.remedy()}"

    def remedy(self) -> str:
        """What would mend it, for a person; empty where the prediction is off."""
        if not self.is_trusted:
            return ""
        text = f"Predicted: {'; '.join(map(str, self.changes))}."
        if not self.changes:
            text = f"Nothing that can be set would give more than {_LEAST_GAIN:.2f}x."
        if self.others:
            gains = " and ".join(f"{name} {gain:.2g}x" for name, gain in self.others.items())
            text += f" It is {self.placement}; on the same GPUs, {gains} would be expected."
        return text

    @property
    def first(self) -> tuple[object, ...]:
        """What it says before all: it is told again when that is something else."""
        better = {name: gain for name, gain in self.others.items() if gain >= _LEAST_GAIN}
        placement = max(better, key=lambda name: better[name], default="")
        return self.short, placement, *((change.key, change.after) for change in self.changes[:1])


def advise(
    steps: Sequence[Step],
    rates: Rates,
    setting: Setting,
    *,
    others: Iterable[Setting] = (),
    gpus: int | None = None,
) -> Advice:
    """What the newest steps of a run say of it. Takes up to a second of processor time.

    Args:
        steps: Their numbers, in order.
        rates: Their rates.
        setting: How the run is set up.
        others: The same in other placements, on the same GPUs.
        gpus: GPUs that the run may have; None if only those that it has are known. Nothing that needs more is
            advised.

    Raises:
        TooFewStepsError: If there are too few.
    """
    share, idle_share = waited(steps), idled(steps)
    step_s = measured_step_s(settled(steps))
    now = predict(rates, setting, num_steps=_SIMULATED_STEPS)
    found = Advice(
        short=_short(share, idle_share) if setting.num_others else "neither",
        waited=share,
        idled=idle_share,
        measured_step_s=step_s,
        now=now,
        changes=(),
        placement=setting.placement,
    )
    if not found.is_trusted:
        return found
    spare = 0 if gpus is None else gpus - setting.gpus
    found_changes = _changes(rates, setting, now, short=found.short, spare_gpus=spare)
    changes = sorted(found_changes, key=lambda change: -change.gain)
    helpful = [change for change in changes if change.gain >= _LEAST_GAIN]
    # Processes that share GPUs, or have none, would share them in another placement, too.
    gains: dict[str, float] = {
        each.placement: _gain(rates, each, now) for each in others if spare >= 0
    }
    return replace(found, changes=tuple(helpful[:_MOST_CHANGES]), others=gains)


def _short(waited_share: float, idle_share: float) -> Short:
    """Return the side that the other one waits for; neither if both wait, or none."""
    if waited_share < _WAITS_LITTLE:
        return "training" if idle_share >= _WAITS_LITTLE else "neither"
    return "generation" if idle_share <= waited_share / 2 else "neither"


def _changes(
    rates: Rates, setting: Setting, now: Prediction, *, short: Short, spare_gpus: int
) -> Iterator[Change]:
    """One change for each part of the setting that can be set alone: the best of those that are tried."""
    tried: dict[str, list[int]] = {
        "rollouts": [setting.rollouts + 1] if spare_gpus >= setting.engine_gpus else [],
        "trainer_gpus": [2 * setting.trainer_gpus] if spare_gpus >= setting.trainer_gpus else [],
        "places": [2 * setting.places],
        "max_staleness": [bound for bound in _BOUNDS if bound > setting.max_staleness][:2],
    }
    if setting.is_colocated:  # both sides, or none, get other GPUs
        del tried["trainer_gpus"]
    if not setting.num_others:
        del tried["rollouts"]
        tried["max_staleness"] = [1] if setting.max_staleness < 1 else []
    # Where all take turns, no side is short, and whatever helps is of use.
    helps = _REMEDIES[short] if setting.num_others else frozenset(tried)
    for name, values in tried.items():
        if name not in helps:
            continue
        gains = {}
        for value in values:
            changed = replace(setting, **{name: value})  # type: ignore[arg-type]
            if name == "max_staleness":
                changed = replace(changed, keeps_responses=True, trains_early=False)
            gains[value] = _gain(rates, changed, now)
        if gains:
            best = max(gains, key=lambda value: gains[value])
            # The least that gives nearly as much is enough.
            after = min(value for value, gain in gains.items() if gain >= 0.97 * gains[best])
            yield Change(
                key=_NAMES[name],
                before=getattr(setting, name),
                after=after,
                gain=gains[after],
            )


def _gain(rates: Rates, setting: Setting, now: Prediction) -> float:
    found = predict(rates, setting, num_steps=_SIMULATED_STEPS)
    return found.samples_per_s / now.samples_per_s
