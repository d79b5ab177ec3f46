"""Inputs of a prediction: rates of a run's parts, and the setting of the run."""

import math
from dataclasses import dataclass, fields
from typing import Literal

from services.controller.planning.lengths import Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTime:
    """Seconds of one decode step of an engine, as a function of the running samples.

    Linear up to the measured concurrency. No gain is assumed beyond it: the engine's tokens per
    second stay the same, for any number of samples.
    """

    fixed_s: float
    """Time of a step that does not depend on its samples: reading the weights, launching kernels."""
    sample_s: float
    """Additional time per sample."""
    most_samples: float
    """Concurrency up to which the linear formula holds."""

    def __call__(self, num_running: int) -> float:
        """Returns the seconds in which each of ``num_running`` samples gets a token."""
        if num_running <= self.most_samples:
            return self.fixed_s + self.sample_s * num_running
        step_s = self.fixed_s + self.sample_s * self.most_samples
        return step_s * num_running / self.most_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of the parts of a run."""

    train_tokens_per_s: float
    """Response tokens per second of a trainer with one GPU; includes the time for prompts and the
    optimizer."""
    decode: DecodeTime
    lengths: Lengths
    prompt_s: float = 0.0
    """Time of an engine for the prompt of a group."""
    outside_s: float = 0.0
    """Time of a sample outside of the engine: tools, environment, reward."""
    step_s: float = 0.02
    """Fixed time of a step: the controller's and the transferqueue's part."""
    piece_s: float = 0.03
    """Fixed time of a part of a step that is trained early."""
    copy_s: float = 0.01
    """Pause of the trainer to copy its weights."""
    transfer_s: float = 0.05
    """Time from that copy until the rollouts have received the weights."""
    stall_s: float = 0.03
    """Pause of an engine to adopt weights."""
    handover_s: float = 1.0
    """Time of both switches of shared GPUs in a step, there and back."""

    def __post_init__(self) -> None:
        decode = self.decode
        positive = {
            "train_tokens_per_s": self.train_tokens_per_s,
            "decode.most_samples": decode.most_samples,
            "a decode step": decode.fixed_s + decode.sample_s,
        }
        others = [field.name for field in fields(self) if field.name.endswith("_s")]
        least = {name: getattr(self, name) for name in others}
        least |= {"decode.fixed_s": decode.fixed_s, "decode.sample_s": decode.sample_s}
        wrong = [f"{name} is {value}" for name, value in positive.items() if not 0 < value < 1e12]
        wrong += [f"{name} is {value}" for name, value in least.items() if not 0 <= value < 1e12]
        if wrong:
            raise ValueError(
                f"rates: {'; '.join(wrong)}; rates must be above 0 and seconds not negative"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Setting of a run: choices of the user, and values that follow from the specification."""

    trainer_gpus: int
    rollouts: int
    """Number of rollouts (engines)."""
    places: int
    """Slots of each rollout: samples that it decodes at once."""
    max_staleness: int
    """``algorithm.max_staleness``."""
    groups_per_step: int
    group_size: int
    keeps_responses: bool = True
    """True if running responses continue under new weights; otherwise an engine finishes them
    first."""
    trains_early: bool = False
    """``trainer.accumulate_early``."""
    publish_every: int = 1
    engine_gpus: int = 1
    """GPUs of one rollout."""
    in_turns: int = 0
    """Number of colocated rollouts, which use the trainer's GPUs by turns."""

    def __post_init__(self) -> None:
        numbers = {
            "GPUs of the trainer": self.trainer_gpus,
            "rollouts": self.rollouts,
            "places": self.places,
            "groups of a step": self.groups_per_step,
            "samples of a group": self.group_size,
            "steps between publications": self.publish_every,
        }
        if wrong := [f"{number} {name}" for name, number in numbers.items() if number < 1]:
            raise ValueError(f"a run cannot have {', '.join(wrong)}: at least 1 of each is needed")
        if self.max_staleness < 0:
            raise ValueError(
                f"a max_staleness of {self.max_staleness} is not possible: 0 is synchronous"
            )

    @property
    def is_colocated(self) -> bool:
        """True if both sides share GPUs."""
        return self.in_turns > 0

    @property
    def num_others(self) -> int:
        """Number of rollouts with their own GPUs."""
        return self.rollouts - self.in_turns

    @property
    def placement(self) -> Literal["disaggregated", "colocated", "mixed"]:
        """``topology.placement``."""
        if not self.is_colocated:
            return "disaggregated"
        return "mixed" if self.num_others else "colocated"

    @property
    def gpus(self) -> int:
        """Number of GPUs of both sides."""
        return self.trainer_gpus + self.engine_gpus * self.num_others

    @property
    def samples_per_step(self) -> int:
        """Number of samples that a step trains."""
        return self.groups_per_step * self.group_size


def together(gpus: int) -> float:
    """Returns the speed-up of a trainer with several GPUs over one: each doubling loses 5 %.

    Measured at 1.90 with two H200s (``bench/results/trainer.json``).
    """
    return float(gpus * 0.95 ** math.log2(gpus))
