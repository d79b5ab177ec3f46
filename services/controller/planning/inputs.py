"""Inputs of a prediction: rates and lengths that a user gives, or that a run has measured."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from statistics import fmean, median
from typing import Any

from services.common.runspec.run import RunSpec
from services.controller.planning.lengths import Geometric, Lengths, Lognormal, Measured
from services.controller.planning.rates import DecodeTime, Rates, Setting, trainer_speedup

# Two H200s, 1.31 billion parameters, prompts of 100 tokens (``bench/results/e2e-geometric.json``).
_WEIGHTS = 1.31e9
_TRAIN_TOKENS_PER_S = 46_000.0
_ENGINE_TOKENS_PER_S = 45_000.0
_DECODE_S = 0.005
_BYTES_PER_S = 4.8e12
_COPY_S, _TRANSFER_S, _STALL_S = 0.01, 0.08, 0.035
# If both sides keep their memory (``bench/results/one-gpu-colocated.json``); and if an engine with
# a KV cache of 90 GB sleeps (``one-gpu-sleeping.json``). Both with 1.5 billion parameters.
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
    "weight sync: copy 10 ms, transfer 80 ms, adopt 35 ms at 1.31 billion parameters",
)
"""Assumptions without a measurement; all for H200s (``bench/results/e2e-geometric.json``)."""
_SHAPES: Mapping[str, type[Geometric] | type[Lognormal]] = {
    "geometric": Geometric,
    "lognormal": Lognormal,
}
_NUMBERS = {field.name for field in fields(Rates)} - {"decode", "lengths"}
_EXAMPLE = "lengths: {geometric: {mean_tokens: 280, max_tokens: 1024}}"

Step = Mapping[str, float | None]
"""Metrics of a step, by name."""
# The first steps compile, and fill the engines.
_WARMUP_STEPS = 3
MIN_STEPS = 5
"""Min number of steps from which rates are measured."""
DECODE_TIMES = ("decode_fixed_s", "decode_sample_s", "decode_max_samples")
"""Decode times that rollouts report and steps record: see ``services/rollout/monitor.py``."""


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
        engine_gpus: GPUs of one rollout.
        max_response_tokens: Max tokens of a response.
        moved_bytes: Bytes of state per trainer GPU that a switch moves to host memory, and another
            one back; None if engines keep their memory, too.
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
    """Returns the rates with those of a document in their place.

    Args:
        rates: Rates for keys that the document lacks.
        document: Mapping read from YAML or JSON.

    Raises:
        ValueError: If it has an unknown key or an invalid rate; the message names the key.
    """
    given = _mapping(document, "rates")
    _refuse_others(given, {*_NUMBERS, "decode", "lengths"}, "rates")
    changes: dict[str, Any] = {
        name: _number(value, name) for name, value in given.items() if name in _NUMBERS
    }
    if "decode" in given:
        changes["decode"] = _made(DecodeTime, given["decode"], "decode")
    if "lengths" in given:
        changes["lengths"] = _lengths(given["lengths"])
    return replace(rates, **changes)


def _lengths(document: Any) -> Lengths:
    given = _mapping(document, "lengths")
    _refuse_others(given, {*_SHAPES, "histogram"}, "lengths")
    if len(given) != 1:
        raise ValueError(f"lengths must have exactly one shape, got {len(given)}; try {_EXAMPLE}")
    ((shape, arguments),) = given.items()
    if shape != "histogram":
        found: Lengths = _made(_SHAPES[shape], arguments, f"lengths.{shape}")
        return found
    counts = _mapping(arguments, "lengths.histogram")
    try:
        return Measured.of({int(bound): int(count) for bound, count in counts.items()})
    except (TypeError, ValueError) as error:
        raise ValueError(f"lengths.histogram must map tokens to counts: {error}") from error


def _made(kind: type[Any], document: Any, key: str) -> Any:
    given = _mapping(document, key)
    names = {field.name for field in fields(kind)}
    _refuse_others(given, names, key)
    if missing := names - given.keys():
        raise ValueError(f"{key} lacks {', '.join(sorted(missing))}")
    return kind(**{name: _number(value, f"{key}.{name}") for name, value in given.items()})


def _mapping(document: Any, key: str) -> Mapping[str, Any]:
    if not isinstance(document, Mapping):
        raise ValueError(  # noqa: TRY004 -- what a user wrote
            f"{key} must be a mapping, got {document!r}; try {_EXAMPLE}"
        )
    return {str(name): value for name, value in document.items()}


def _refuse_others(given: Mapping[str, Any], known: set[str], key: str) -> None:
    if others := sorted(given.keys() - known):
        raise ValueError(
            f"{key} must have only the keys {', '.join(sorted(known))}, got {', '.join(others)}"
        )


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} must be a number, got {value!r}")  # noqa: TRY004 -- as above
    return value


class TooFewStepsError(ValueError):
    """A run has too few measurements; the message names what is missing."""


def setting_of(spec: RunSpec) -> Setting:
    """Returns the setting of a run."""
    return Setting(
        trainer_gpus=spec.trainer.world_size,
        rollouts=spec.rollout.replicas,
        slots=spec.rollout.max_running_samples,
        max_staleness=spec.algorithm.max_staleness,
        groups_per_step=spec.trainer.prompts_per_step,
        group_size=spec.samples_per_group,
        partial_rollout=spec.rollout.partial_rollout,
        accumulate_early=spec.trainer.accumulate_early,
        publish_every=spec.weight_sync.publish_every,
        engine_gpus=spec.engine_gpus,
        colocated_rollouts=spec.colocated_rollouts,
    )


def settled(steps: Sequence[Step]) -> Sequence[Step]:
    """Returns the steps that are representative of a run's speed, from steps in order from the first.

    Raises:
        TooFewStepsError: If there are too few.
    """
    whole = [
        step for step in steps if _number_of(step, "step") > _WARMUP_STEPS and step.get("seconds")
    ]
    if len(whole) < MIN_STEPS:
        raise TooFewStepsError(
            f"rates need {MIN_STEPS} steps after the first {_WARMUP_STEPS} (which compile and fill the "
            f"engines), got {len(whole)}; wait for more steps"
        )
    return whole


def rates_of(steps: Sequence[Step], lengths: Mapping[int, int], *, setting: Setting) -> Rates:
    """Measures a run's rates from its own steps.

    Args:
        steps: Metrics of the steps, as the API and the events give them.
        lengths: Number of responses by upper bound of their length.
        setting: Setting of the run.

    Raises:
        TooFewStepsError: If a metric is missing.
    """
    found = settled(steps)
    trained = [step for step in found if step.get("seconds_total") and step.get("response_tokens")]
    decoding = [step for step in found if all(step.get(name) is not None for name in DECODE_TIMES)]
    if not (trained and decoding and lengths):
        missing = {
            "seconds_total and response_tokens of the trainer": trained,
            "decode times of the rollouts": decoding,
            "response lengths": lengths,
        }
        raise TooFewStepsError(
            "the run's steps lack "
            + ", ".join(name for name, there in missing.items() if not there)
            + "; use a run of this release that has trained steps"
        )
    # Medians, because a step that compiled or waited for a disk is not representative.
    a_gpu = median(
        _number_of(s, "response_tokens") / _number_of(s, "seconds_total") for s in trained
    )
    synced = [step for step in found if step.get("sync_ms") is not None]
    ms = {
        name: _median_ms(synced, name) for name in ("copy", "prepare", "transfer", "adopt", "stall")
    }
    # Without partial rollout an adoption waits for responses, which the simulation models itself.
    waiting_ms = max(0.0, ms["adopt"] - ms["stall"]) if setting.partial_rollout else 0.0
    switch, prepared_ms = {}, ms["prepare"] - ms["copy"]
    if setting.is_colocated:
        back_s = median(
            _number_of(s, "trainer_sleep_s") + _number_of(s, "rollouts_wake_s") for s in found
        )
        switch = {"gpu_switch_s": median(_number_of(step, "gpu_switch_s") for step in found)}
        prepared_ms -= 1000 * back_s  # part of the time to prepare
    prepared_ms = max(0.0, prepared_ms)
    fixed_s, sample_s, most = (
        fmean(_number_of(step, name) for step in decoding) for name in DECODE_TIMES
    )
    return Rates(
        train_tokens_per_s=a_gpu / trainer_speedup(setting.trainer_gpus),
        decode=DecodeTime(fixed_s=fixed_s, sample_s=sample_s, max_samples=max(1.0, most)),
        lengths=Measured.of_run(lengths, mean_tokens=_mean_tokens(trained)),
        step_s=median(_number_of(step, "idle_seconds_control") for step in found),
        copy_s=ms["copy"] / 1000,
        transfer_s=(prepared_ms + ms["transfer"] + waiting_ms) / 1000,
        stall_s=ms["stall"] / 1000,
        **switch,
    )


def _mean_tokens(trained: Sequence[Step]) -> float:
    """Returns the mean tokens of a response."""
    tokens = sum(_number_of(step, "response_tokens") for step in trained)
    return tokens / max(1.0, sum(_number_of(step, "samples") for step in trained))


def measured_step_s(steps: Sequence[Step]) -> float:
    """Returns the mean seconds of a step."""
    return fmean(_number_of(step, "seconds") for step in settled(steps))


def waited(steps: Sequence[Step]) -> float:
    """Returns the fraction of the time in which the trainer waited for samples."""
    found = settled(steps)
    seconds = sum(_number_of(step, "seconds") for step in found)
    return sum(_number_of(step, "trainer_wait_s") for step in found) / seconds


def idled(steps: Sequence[Step]) -> float:
    """Returns the fraction of the time in which the rollouts had nothing to generate, their mean."""
    found = settled(steps)
    seconds = sum(_number_of(step, "seconds") for step in found)
    return sum(_number_of(step, "rollout_idle_s") for step in found) / seconds


def _median_ms(steps: Sequence[Step], name: str) -> float:
    return median(_number_of(step, f"{name}_ms") for step in steps) if steps else 0.0


def _number_of(step: Step, name: str) -> float:
    return float(step.get(name) or 0.0)
