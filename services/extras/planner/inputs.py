"""Inputs of a prediction: rates and response lengths that a user gives, or that a run has measured."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from random import Random
from statistics import NormalDist, fmean, median
from typing import Any, Literal, Protocol

from services.common.runspec.run import RunSpec
from services.controller.rules.learning import DECODE_TIMES

_MAX_SIGMA = 5.0
# Forward and backward take 1.65 times as long beside a decoding engine (``bench/results/gsm8k-1.5b.json``,
# trainer_works_s of lag 4 and synchronous), and an engine makes 17,547 tokens/s beside a trainer that works
# 63 % of the time, of 19,374 alone (``one-gpu-duel.json``, seventh host).
_TRAIN_SLOWDOWN, _DECODE_SLOWDOWN = 1.65, 1.17


class Lengths(Protocol):
    """Distribution of response lengths, in tokens."""

    def draws(self, rng: Random) -> Iterator[int]:
        """Yields random response lengths of at least 1 token, without end."""

    def mean(self) -> float:
        """Returns the mean number of tokens of a response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometric:
    """Geometric distribution: every token ends the response with the same probability."""

    mean_tokens: float
    """Mean before truncation."""
    max_tokens: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean_tokens) and self.mean_tokens > 1 and self.max_tokens >= 1):
            raise ValueError(
                f"lengths: mean_tokens must be above 1 and max_tokens at least 1, got {self.mean_tokens} "
                f"and {self.max_tokens}"
            )

    def draws(self, rng: Random) -> Iterator[int]:
        """Yields random response lengths, without end."""
        per_token = math.log1p(-1 / self.mean_tokens)
        while True:
            yield min(1 + int(math.log1p(-rng.random()) / per_token), self.max_tokens)

    def mean(self) -> float:
        """Returns the mean number of tokens, after truncation."""
        return self.mean_tokens * (1 - (1 - 1 / self.mean_tokens) ** self.max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """Log-normal distribution: most responses are short, a few are very long."""

    median_tokens: float
    sigma: float
    """Standard deviation of the logarithm; with 1.0, one in a hundred is ten times as long as the
    median."""
    max_tokens: int

    def __post_init__(self) -> None:
        if not (
            math.isfinite(self.median_tokens)
            and self.median_tokens >= 1
            and 0 <= self.sigma <= _MAX_SIGMA
            and self.max_tokens >= 1
        ):
            raise ValueError(
                f"lengths: median_tokens and max_tokens must be at least 1 and sigma from 0 to "
                f"{_MAX_SIGMA}, got {self.median_tokens}, {self.max_tokens} and {self.sigma}"
            )

    def draws(self, rng: Random) -> Iterator[int]:
        """Yields random response lengths, without end."""
        middle = math.log(self.median_tokens)
        while True:
            num_tokens = round(math.exp(rng.gauss(middle, self.sigma)))
            yield min(max(1, num_tokens), self.max_tokens)

    def mean(self) -> float:
        """Returns the mean number of tokens, after truncation."""
        normal, middle = NormalDist(), math.log(self.median_tokens)
        if self.sigma == 0:
            return min(self.median_tokens, self.max_tokens)
        cut = (math.log(self.max_tokens) - middle) / self.sigma
        below = math.exp(middle + self.sigma**2 / 2) * normal.cdf(cut - self.sigma)
        return below + self.max_tokens * (1 - normal.cdf(cut))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Histogram of lengths, uniform inside each bucket or around its mean."""

    bounds: tuple[int, ...]
    """Max length in each bucket, in ascending order."""
    counts: tuple[int, ...]
    """Responses in each bucket."""
    lowest: tuple[int, ...] = ()
    """Min length in each bucket; empty if each begins after the previous one."""
    lean: float = 0.5
    """Position of each bucket's mean, from 0 (its min length) to 1 (its max length)."""

    def __post_init__(self) -> None:
        is_rising = all(low < high for low, high in zip(self.bounds, self.bounds[1:], strict=False))
        if not (
            len(self.bounds) == len(self.counts)
            and is_rising
            and self.bounds
            and min(self.bounds) >= 0
            and min(self.counts) >= 0
            and sum(self.counts) > 0
        ):
            raise ValueError(
                "lengths: bounds must ascend from 0, with one count each, none negative and not all 0; got "
                f"bounds {self.bounds} and counts {self.counts}"
            )

    @classmethod
    def of(cls, histogram: Mapping[int, int]) -> "Measured":
        """Creates a histogram from counts by upper bound."""
        bounds = tuple(sorted(histogram))
        return cls(bounds=bounds, counts=tuple(histogram[bound] for bound in bounds))

    @classmethod
    def of_run(cls, histogram: Mapping[int, int], *, mean_tokens: float) -> "Measured":
        """Creates a histogram from a run's counts by upper bound and the mean of all responses."""
        distribution = replace(
            cls.of(histogram), lowest=tuple(map(_lower_bound_of, sorted(histogram)))
        )
        least, greatest = (replace(distribution, lean=lean).mean() for lean in (0.0, 1.0))
        # A mean outside this range is not the mean of these lengths: if samples have several
        # sequences, it is the mean of the sequences.
        if not least <= mean_tokens <= greatest or least == greatest:
            return distribution
        return replace(distribution, lean=(mean_tokens - least) / (greatest - least))

    def draws(self, rng: Random) -> Iterator[int]:
        """Yields random response lengths, without end."""
        upto, buckets = list(accumulate(self.counts)), list(self._buckets())
        while True:
            low, high = buckets[bisect_right(upto, rng.random() * upto[-1])]
            width = 2 * min(self.lean, 1 - self.lean) * (high - low)
            first = low if self.lean <= 0.5 else high - width
            # The second random number rounds stochastically: up with the fraction as probability.
            yield int(first + rng.random() * width + rng.random())

    def mean(self) -> float:
        means = (low + self.lean * (high - low) for low, high in self._buckets())
        total = sum(m * count for m, count in zip(means, self.counts, strict=True))
        return total / sum(self.counts)

    def _buckets(self) -> Iterator[tuple[int, int]]:
        """Yields the min and max length of each bucket."""
        behind = (0, *self.bounds)
        lowest = self.lowest or (below + 1 for below in behind)
        for low, bound in zip(lowest, self.bounds, strict=False):
            yield max(1, min(low, bound)), max(1, bound)


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
    train_slowdown: float = _TRAIN_SLOWDOWN
    """Time of the trainer's work while an engine decodes on the same GPU, relative to its time alone."""
    decode_slowdown: float = _DECODE_SLOWDOWN
    """Time of a decode step while a trainer works on the same GPU, relative to its time alone."""

    def __post_init__(self) -> None:
        decode = self.decode
        positive = {
            "train_tokens_per_s": self.train_tokens_per_s,
            "decode.max_samples": decode.max_samples,
            "decode.fixed_s + decode.sample_s": decode.fixed_s + decode.sample_s,
        }
        durations = [field.name for field in fields(self) if field.name.endswith("_s")]
        least = {name: getattr(self, name) for name in durations}
        least |= {"decode.fixed_s": decode.fixed_s, "decode.sample_s": decode.sample_s}
        slowdowns = {name: getattr(self, name) for name in ("train_slowdown", "decode_slowdown")}
        if slow := [
            f"{name} is {value}" for name, value in slowdowns.items() if not 1 <= value < 100
        ]:
            raise ValueError(f"slowdowns must be at least 1 (none), but {'; '.join(slow)}")
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
    stale_wait_s: float = 180.0
    """Max seconds per step that the trainer waits for groups which would become too stale; 0 unless
    ``algorithm.on_stale`` is ``wait``."""
    publish_every: int = 1
    engine_gpus: int = 1
    """GPUs of one rollout."""
    colocated_rollouts: int = 0
    """Number of colocated rollouts, which use the trainer's GPUs by turns."""
    shares_gpu: bool = False
    """True if trainer and rollouts use the same GPU at the same time, as ``run`` starts them on a machine
    with one GPU."""

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
        if self.stale_wait_s < 0:
            raise ValueError(f"stale_wait_s must be 0 or more seconds, got {self.stale_wait_s}")
        if self.shares_gpu and self.colocated_rollouts:
            raise ValueError(
                "rollouts use the trainer's GPU at the same time or by turns, not both"
            )

    @property
    def is_colocated(self) -> bool:
        """True if rollouts use the trainer's GPUs by turns."""
        return self.colocated_rollouts > 0

    @property
    def dedicated_rollouts(self) -> int:
        """Number of rollouts with their own GPUs."""
        return self.rollouts - self.colocated_rollouts

    @property
    def placement(self) -> Literal["disaggregated", "colocated", "mixed"]:
        if not self.is_colocated:
            return "disaggregated"
        return "mixed" if self.dedicated_rollouts else "colocated"

    @property
    def gpus(self) -> int:
        """Number of GPUs of both sides."""
        if self.shares_gpu:
            return self.trainer_gpus
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


# Two H200s, 1.31 billion parameters, prompts of 100 tokens (``bench/results/e2e-geometric.json``).
_WEIGHTS = 1.31e9
_TRAIN_TOKENS_PER_S = 46_000.0
_ENGINE_TOKENS_PER_S = 45_000.0
_DECODE_S = 0.005
_BYTES_PER_S = 4.8e12
_COPY_S, _TRANSFER_S, _STALL_S = 0.01, 0.08, 0.035
# Seconds if both sides keep their memory (``bench/results/one-gpu-colocated.json``), and if an engine
# with a KV cache of 90 GB sleeps (``one-gpu-sleeping.json``). Both with 1.5 billion parameters.
_RESIDENT_SWITCH_S, _SWITCH_S = 0.01, 0.41
_HOST_BYTES_PER_S = 5e10
# Mean response length as a fraction of the max.
_MEAN_LENGTH = 0.25

ASSUMPTIONS = (
    "training: 46,000 response tokens/s per GPU at 1.31 billion active parameters, inversely proportional "
    "to them; each doubling of the trainer's GPUs loses 5 %",
    "generation: at most 45,000 tokens/s per rollout; a decode step takes 5 ms and the time to read the "
    "weights at 4.8 TB/s",
    "responses: geometric, mean length a quarter of rollout.max_response_tokens",
    "GPU switches (colocated): 0.01 s per step if trainer and engines fit into memory together, otherwise "
    "0.41 s (measured with 1.5 billion parameters) and the time to move the trainer's state to host memory "
    "and back at 50 GB/s",
    "one GPU that trainer and engine share: the trainer's work takes 1.65 times as long beside a decoding "
    "engine, a decode step 1.17 times as long beside a working trainer",
    "weight sync: copy 10 ms, transfer 80 ms, adopt 35 ms at 1.31 billion parameters",
)
"""Assumptions that replace measured rates; all for H200s (``bench/results/e2e-geometric.json``)."""
_SHAPES: Mapping[str, type[Geometric] | type[Lognormal]] = {
    "geometric": Geometric,
    "lognormal": Lognormal,
}
_NUMBERS = {field.name for field in fields(Rates)} - {"decode", "lengths"}
_EXAMPLE = "lengths: {geometric: {mean_tokens: 280, max_tokens: 1024}}"

Step = Mapping[str, float | None]
"""Metrics of a step, by name."""
# The first steps are not representative: they compile and fill the engines.
_WARMUP_STEPS = 3
MIN_STEPS = 5
"""Min number of steps from which rates are measured."""


def default_rates(
    *,
    weights: float,
    active_weights: float,
    engine_gpus: int,
    max_response_tokens: int,
    moved_bytes: float | None = None,
) -> Rates:
    """Returns the rates of an H200 for a model, scaled from a measured one.

    Args:
        weights: Number of parameters of the model.
        active_weights: Number of parameters that a token passes.
        moved_bytes: Bytes of state per trainer GPU that one switch moves to host memory and the other
            one moves back; None if trainer and engines keep their memory.
    """
    size = weights / _WEIGHTS
    gpu_switch_s = _RESIDENT_SWITCH_S
    if moved_bytes is not None:
        gpu_switch_s = _SWITCH_S + 2 * moved_bytes / _HOST_BYTES_PER_S
    fixed_s = _DECODE_S + 2 * weights / _BYTES_PER_S / engine_gpus
    return Rates(
        train_tokens_per_s=_TRAIN_TOKENS_PER_S * _WEIGHTS / active_weights,
        decode=DecodeTime(
            fixed_s=fixed_s, sample_s=0.0, max_samples=fixed_s * _ENGINE_TOKENS_PER_S
        ),
        lengths=Geometric(
            mean_tokens=max(2.0, _MEAN_LENGTH * max_response_tokens), max_tokens=max_response_tokens
        ),
        copy_s=_COPY_S * size,
        transfer_s=_TRANSFER_S * size,
        stall_s=_STALL_S * size,
        gpu_switch_s=gpu_switch_s,
    )


def with_overrides(rates: Rates, document: Any) -> Rates:
    """Returns the rates with the values that a document overrides.

    Args:
        rates: Rates for keys that the document lacks.

    Raises:
        ValueError: If it has an unknown key or an invalid rate; the message names the key.
    """
    overrides = _mapping(document, "rates")
    _refuse_others(overrides, {*_NUMBERS, "decode", "lengths"}, "rates")
    changes: dict[str, Any] = {
        name: _number(value, name) for name, value in overrides.items() if name in _NUMBERS
    }
    if "decode" in overrides:
        changes["decode"] = _made(DecodeTime, overrides["decode"], "decode")
    if "lengths" in overrides:
        changes["lengths"] = _lengths(overrides["lengths"])
    return replace(rates, **changes)


def _lengths(document: Any) -> Lengths:
    shapes = _mapping(document, "lengths")
    _refuse_others(shapes, {*_SHAPES, "histogram"}, "lengths")
    if len(shapes) != 1:
        raise ValueError(f"lengths must have exactly one shape, got {len(shapes)}; try {_EXAMPLE}")
    ((shape, arguments),) = shapes.items()
    if shape != "histogram":
        lengths: Lengths = _made(_SHAPES[shape], arguments, f"lengths.{shape}")
        return lengths
    counts = _mapping(arguments, "lengths.histogram")
    try:
        return Measured.of({int(bound): int(count) for bound, count in counts.items()})
    except (TypeError, ValueError) as error:
        raise ValueError(f"lengths.histogram must map tokens to counts: {error}") from error


def _made(kind: type[Any], document: Any, key: str) -> Any:
    values = _mapping(document, key)
    names = {field.name for field in fields(kind)}
    _refuse_others(values, names, key)
    if missing_names := names - values.keys():
        raise ValueError(f"{key} lacks {', '.join(sorted(missing_names))}")
    return kind(**{name: _number(value, f"{key}.{name}") for name, value in values.items()})


def _mapping(document: Any, key: str) -> Mapping[str, Any]:
    if not isinstance(document, Mapping):
        raise ValueError(  # noqa: TRY004 -- what a user wrote
            f"{key} must be a mapping, got {document!r}; try {_EXAMPLE}"
        )
    return {str(name): value for name, value in document.items()}


def _refuse_others(mapping: Mapping[str, Any], allowed_keys: set[str], key: str) -> None:
    if unknown_keys := sorted(mapping.keys() - allowed_keys):
        raise ValueError(
            f"{key} must have only the keys {', '.join(sorted(allowed_keys))}, got {', '.join(unknown_keys)}"
        )


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} must be a number, got {value!r}")  # noqa: TRY004 -- as above
    return value


class TooFewStepsError(ValueError):
    """A run has too few measurements; the message names what is missing."""


def setting_of(spec: RunSpec) -> Setting:
    return Setting(
        trainer_gpus=spec.trainer.world_size,
        rollouts=spec.rollout.replicas,
        slots=spec.rollout.max_running_samples,
        max_staleness=spec.algorithm.max_staleness,
        groups_per_step=spec.trainer.prompts_per_step,
        group_size=spec.samples_per_group,
        partial_rollout=spec.rollout.partial_rollout,
        accumulate_early=spec.trainer.accumulate_early,
        stale_wait_s=(
            spec.algorithm.stale_wait_timeout_s if spec.algorithm.on_stale == "wait" else 0.0
        ),
        publish_every=spec.weight_sync.publish_every,
        engine_gpus=spec.engine_gpus,
        colocated_rollouts=spec.colocated_rollouts,
    )


def representative_steps(steps: Sequence[Step]) -> Sequence[Step]:
    """Returns the steps that are representative of a run's speed: those after the warm-up, with a time.

    Raises:
        TooFewStepsError: If there are too few.
    """
    complete_steps = [
        step for step in steps if _number_of(step, "step") > _WARMUP_STEPS and step.get("seconds")
    ]
    if len(complete_steps) < MIN_STEPS:
        raise TooFewStepsError(
            f"rates need {MIN_STEPS} steps after the first {_WARMUP_STEPS} (which compile and fill the "
            f"engines), got {len(complete_steps)}; wait for more steps"
        )
    return complete_steps


def rates_of(steps: Sequence[Step], lengths: Mapping[int, int], *, setting: Setting) -> Rates:
    """Measures a run's rates from its own steps.

    Args:
        steps: Metrics of the steps, as the API and the events give them.
        lengths: Number of responses by upper bound of their length.

    Raises:
        TooFewStepsError: If a metric is missing.
    """
    representative = representative_steps(steps)
    trained = [
        step for step in representative if step.get("seconds_total") and step.get("response_tokens")
    ]
    decoding = [
        step for step in representative if all(step.get(name) is not None for name in DECODE_TIMES)
    ]
    if not (trained and decoding and lengths):
        is_measured = {
            "seconds_total and response_tokens of the trainer": trained,
            "decode times of the rollouts": decoding,
            "response lengths": lengths,
        }
        raise TooFewStepsError(
            "the run's steps lack "
            + ", ".join(name for name, is_there in is_measured.items() if not is_there)
            + "; use a run of this release that has trained steps"
        )
    # Medians, because a step that compiled or waited for a disk is not representative.
    a_gpu = median(
        _number_of(s, "response_tokens") / _number_of(s, "seconds_total") for s in trained
    )
    synced = [step for step in representative if step.get("sync_ms") is not None]
    ms = {
        name: _median_ms(synced, name) for name in ("copy", "prepare", "transfer", "adopt", "stall")
    }
    # Without partial rollout an adoption waits for responses, which the simulation models itself.
    waiting_ms = max(0.0, ms["adopt"] - ms["stall"]) if setting.partial_rollout else 0.0
    switch, prepared_ms = {}, ms["prepare"] - ms["copy"]
    if setting.is_colocated:
        back_s = median(
            _number_of(s, "trainer_sleep_s") + _number_of(s, "rollouts_wake_s")
            for s in representative
        )
        switch = {
            "gpu_switch_s": median(_number_of(step, "gpu_switch_s") for step in representative)
        }
        prepared_ms -= 1000 * back_s  # included in the time to prepare
    prepared_ms = max(0.0, prepared_ms)
    fixed_s, sample_s, max_samples = (
        fmean(_number_of(step, name) for step in decoding) for name in DECODE_TIMES
    )
    if setting.shares_gpu and setting.max_staleness > 0:
        # Steps have the times of both sides at once; rates are those of one side alone.
        a_gpu *= _TRAIN_SLOWDOWN
        beside = 1 + (_DECODE_SLOWDOWN - 1) * (1 - waited_fraction(representative))
        fixed_s, sample_s = fixed_s / beside, sample_s / beside
    return Rates(
        train_tokens_per_s=a_gpu / trainer_speedup(setting.trainer_gpus),
        decode=DecodeTime(fixed_s=fixed_s, sample_s=sample_s, max_samples=max(1.0, max_samples)),
        lengths=Measured.of_run(lengths, mean_tokens=_mean_tokens(trained)),
        step_s=median(_number_of(step, "idle_seconds_control") for step in representative),
        copy_s=ms["copy"] / 1000,
        transfer_s=(prepared_ms + ms["transfer"] + waiting_ms) / 1000,
        stall_s=ms["stall"] / 1000,
        **switch,
    )


def _mean_tokens(trained: Sequence[Step]) -> float:
    tokens = sum(_number_of(step, "response_tokens") for step in trained)
    return tokens / max(1.0, sum(_number_of(step, "samples") for step in trained))


def measured_step_s(steps: Sequence[Step]) -> float:
    return fmean(_number_of(step, "seconds") for step in representative_steps(steps))


def waited_fraction(steps: Sequence[Step]) -> float:
    """Returns the fraction of the time in which the trainer waited for samples."""
    representative = representative_steps(steps)
    seconds = sum(_number_of(step, "seconds") for step in representative)
    return sum(_number_of(step, "trainer_wait_s") for step in representative) / seconds


def idle_fraction(steps: Sequence[Step]) -> float:
    """Returns the fraction of the time in which a rollout had nothing to generate, averaged over them."""
    representative = representative_steps(steps)
    seconds = sum(_number_of(step, "seconds") for step in representative)
    return sum(_number_of(step, "rollout_idle_s") for step in representative) / seconds


def _median_ms(steps: Sequence[Step], name: str) -> float:
    return median(_number_of(step, f"{name}_ms") for step in steps) if steps else 0.0


def _number_of(step: Step, name: str) -> float:
    return float(step.get(name) or 0.0)


def _lower_bound_of(bound: int) -> int:
    """Returns the smallest number in the bucket with the upper bound ``bound``."""
    if bound < 3:
        return bound
    is_power = bound & (bound - 1) == 0
    return (bound * 3 // 4 if is_power else bound * 2 // 3) + 1
