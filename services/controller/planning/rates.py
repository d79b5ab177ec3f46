"""What a run is made of when its time is reckoned: rates of its parts, and how they are set up."""

import math
from dataclasses import dataclass, fields
from typing import Literal

from services.controller.planning.lengths import Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTime:
    """Seconds of one decode step of an engine, from the samples that it decodes at once.

    A line up to the concurrency that was measured. Beyond it no gain is assumed: the engine makes as many
    tokens as there, however many samples share them.
    """

    fixed_s: float
    """Of a step whatever it decodes: reading the weights, launching kernels."""
    sample_s: float
    """More for each sample."""
    most_samples: float
    """Concurrency up to which that holds."""

    def __call__(self, num_running: int) -> float:
        """Seconds in which each of so many samples gets a token."""
        if num_running <= self.most_samples:
            return self.fixed_s + self.sample_s * num_running
        step_s = self.fixed_s + self.sample_s * self.most_samples
        return step_s * num_running / self.most_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast the parts of a run are."""

    train_tokens_per_s: float
    """Response tokens that a trainer of one GPU trains; their prompts and the optimizer are counted in."""
    decode: DecodeTime
    lengths: Lengths
    prompt_s: float = 0.0
    """Time of an engine for the prompt of a group."""
    outside_s: float = 0.0
    """What a sample takes outside of the engine: tools, environment, reward."""
    step_s: float = 0.02
    """Of a step whatever it trains: the controller's and the transferqueue's part."""
    piece_s: float = 0.03
    """The same for a part of a step that is trained early."""
    copy_s: float = 0.01
    """Trainer's pause for a copy of its weights."""
    transfer_s: float = 0.05
    """From there until the rollouts have received them."""
    stall_s: float = 0.03
    """Pause of an engine that puts them into service."""
    handover_s: float = 1.0
    """Of a step in turns: until the other side has the GPUs, there and back."""

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
    """What a user chooses, and what follows from the specification."""

    trainer_gpus: int
    rollouts: int
    """Engines."""
    places: int
    """Samples that each decodes at once."""
    max_staleness: int
    """``algorithm.max_staleness``."""
    groups_per_step: int
    group_size: int
    keeps_responses: bool = True
    """Whether running responses go on under new weights; otherwise an engine finishes them first."""
    trains_early: bool = False
    """``trainer.accumulate_early``."""
    publish_every: int = 1
    engine_gpus: int = 1
    """Of one rollout."""
    in_turns: int = 0
    """Rollouts on the trainer's GPUs, which one side has after the other."""

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
        """Whether there are GPUs that both sides use."""
        return self.in_turns > 0

    @property
    def num_others(self) -> int:
        """Rollouts with GPUs of their own."""
        return self.rollouts - self.in_turns

    @property
    def placement(self) -> Literal["disaggregated", "colocated", "mixed"]:
        """``topology.placement``."""
        if not self.is_colocated:
            return "disaggregated"
        return "mixed" if self.num_others else "colocated"

    @property
    def gpus(self) -> int:
        """GPUs of all."""
        return self.trainer_gpus + self.engine_gpus * self.num_others

    @property
    def samples_per_step(self) -> int:
        """Samples that a step trains."""
        return self.groups_per_step * self.group_size


def together(gpus: int) -> float:
    """How many times the work of one trainer's GPU several do: 5 % are lost each time they are doubled.

    Measured at 1.90 with two H200s (``bench/results/trainer.json``).
    """
    return float(gpus * 0.95 ** math.log2(gpus))
