"""Which side of a run is short, and what would mend it: predicted, and never without a check.

What is predicted for the run as it is must agree with what was measured of it; otherwise nothing is promised.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from services.controller.planning.measured import Step, measured_step_s, settled, waited
from services.controller.planning.outcome import Prediction
from services.controller.planning.prediction import predict
from services.controller.planning.rates import Rates, Setting

LARGEST_ERROR = 0.15
"""By how much a prediction may be off for the run as it is."""
_LEAST_GAIN = 1.05
_MOST_CHANGES = 3
_BOUNDS = (1, 2, 4, 8)
_SIMULATED_STEPS = 16
_WAITS_MUCH, _WAITS_LITTLE = 0.5, 0.1
Short = Literal["generation", "training", "neither"]

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
        """The same for a person."""
        side = {
            "generation": "Generation is short",
            "training": "Training is short",
            "neither": "Neither side is short",
        }[self.short]
        if self.placement == "colocated":
            side = "Neither side is short, since they take turns"
        text = f"{side}: the trainer waited {100 * self.waited:.0f} % of the time for samples."
        if not self.is_trusted:
            return (
                f"{text} What would mend it is not predicted: for the run as it is the prediction is "
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
    steps: Sequence[Step], rates: Rates, setting: Setting, *, others: Iterable[Setting] = ()
) -> Advice:
    """What the newest steps of a run say of it. Takes up to a second of processor time.

    Args:
        steps: Their numbers, in order.
        rates: Their rates.
        setting: How the run is set up.
        others: The same in other placements, on the same GPUs.

    Raises:
        TooFewStepsError: If there are too few.
    """
    share, step_s = waited(steps), measured_step_s(settled(steps))
    now = predict(rates, setting, num_steps=_SIMULATED_STEPS)
    found = Advice(
        short=_short(share) if setting.num_others else "neither",
        waited=share,
        measured_step_s=step_s,
        now=now,
        changes=(),
        placement=setting.placement,
    )
    if not found.is_trusted:
        return found
    changes = sorted(_changes(rates, setting, now), key=lambda change: -change.gain)
    helpful = [change for change in changes if change.gain >= _LEAST_GAIN]
    gains: dict[str, float] = {each.placement: _gain(rates, each, now) for each in others}
    return replace(found, changes=tuple(helpful[:_MOST_CHANGES]), others=gains)


def _short(share: float) -> Short:
    if share >= _WAITS_MUCH:
        return "generation"
    return "training" if share < _WAITS_LITTLE else "neither"


def _changes(rates: Rates, setting: Setting, now: Prediction) -> Iterator[Change]:
    """One change for each part of the setting that can be set alone: the best of those that are tried."""
    tried: dict[str, list[int]] = {
        "rollouts": [setting.rollouts + 1],
        "trainer_gpus": [2 * setting.trainer_gpus],
        "places": [2 * setting.places],
        "max_staleness": [bound for bound in _BOUNDS if bound > setting.max_staleness][:2],
    }
    if setting.takes_turns:  # both sides, or none, get other GPUs
        del tried["trainer_gpus"]
    if not setting.num_others:
        del tried["rollouts"]
        tried["max_staleness"] = [1] if setting.max_staleness < 1 else []
    for name, values in tried.items():
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
