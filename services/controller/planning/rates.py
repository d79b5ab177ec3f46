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
    max_samples: float
    """Concurrency up to which the linear formula holds."""

    def __call__(self, num_running: int) -> float:
        """Returns the seconds in which each of ``num_running`` samples gets a token."""
        if num_running <= self.max_samples:
            return self.fixed_s + self.sample_s * num_running
        step_s = self.fixed_s + self.sample_s * self.max_samples
        return step_s * num_running / self.max_samples


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
    gpu_switch_s: float = 1.0
    """Time of both switches of shared GPUs in a step, there and back."""

    def __post_init__(self) -> None:
        decode = self.decode
        positive = {
            "train_tokens_per_s": self.train_tokens_per_s,
            "decode.max_samples": decode.max_samples,
            "decode.fixed_s + decode.sample_s": decode.fixed_s + decode.sample_s,
        }
        others = [field.name for field in fields(self) if field.name.endswith("_s")]
        least = {name: getattr(self, name) for name in others}
        least |= {"decode.fixed_s": decode.fixed_s, "decode.sample_s": decode.sample_s}
        wrong = [f"{name} is {value}" for name, value in positive.items() if not 0 < value < 1e12]
        wrong += [f"{name} is {value}" for name, value in least.items() if not 0 <= value < 1e12]
        if wrong:
            raise ValueError(
                f"rates must be above 0 and seconds not negative, but {'; '.join(wrong)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Setting of a run: choices of the user, and values that follow from the specification."""

    trainer_gpus: int
    rollouts: int
    """Number of rollouts (engines)."""
    slots: int
    """Slots of each rollout: samples that it decodes at once."""
    max_staleness: int
    """``algorithm.max_staleness``."""
    groups_per_step: int
    group_size: int
    partial_rollout: bool = True
    """True if running responses continue under new weights; otherwise an engine finishes them
    first."""
    accumulate_early: bool = False
    """``trainer.accumulate_early``."""
    publish_every: int = 1
    engine_gpus: int = 1
    """GPUs of one rollout."""
    colocated_rollouts: int = 0
    """Number of colocated rollouts, which use the trainer's GPUs by turns."""

    def __post_init__(self) -> None:
        numbers = {
            "trainer_gpus": self.trainer_gpus,
            "rollouts": self.rollouts,
            "slots": self.slots,
            "groups_per_step": self.groups_per_step,
            "group_size": self.group_size,
            "publish_every": self.publish_every,
        }
        if wrong := [f"{name} is {number}" for name, number in numbers.items() if number < 1]:
            raise ValueError(f"all parts of a setting must be at least 1, but {', '.join(wrong)}")
        if self.max_staleness < 0:
            raise ValueError(
                f"max_staleness must be 0 (synchronous) or more, got {self.max_staleness}"
            )

    @property
    def is_colocated(self) -> bool:
        """True if both sides share GPUs."""
        return self.colocated_rollouts > 0

    @property
    def dedicated_rollouts(self) -> int:
        """Number of rollouts with their own GPUs."""
        return self.rollouts - self.colocated_rollouts

    @property
    def placement(self) -> Literal["disaggregated", "colocated", "mixed"]:
        """``topology.placement``."""
        if not self.is_colocated:
            return "disaggregated"
        return "mixed" if self.dedicated_rollouts else "colocated"

    @property
    def gpus(self) -> int:
        """Number of GPUs of both sides."""
        return self.trainer_gpus + self.engine_gpus * self.dedicated_rollouts

    @property
    def samples_per_step(self) -> int:
        """Number of samples that a step trains."""
        return self.groups_per_step * self.group_size


def trainer_speedup(gpus: int) -> float:
    """Returns the speed-up of a trainer with several GPUs over one: each doubling loses 5 %.

    Measured at 1.90 with two H200s (``bench/results/trainer.json``).
    """
    return float(gpus * 0.95 ** math.log2(gpus))
