"""Rates for GPUs without measurements: defaults with their sources, and user overrides."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from services.controller.planning.lengths import Geometric, Lengths, Lognormal, Measured
from services.controller.planning.rates import DecodeTime, Rates

# Two H200s, 1.31 billion parameters, prompts of 100 tokens (``bench/results/e2e-geometric.json``).
_WEIGHTS = 1.31e9
_TRAIN_TOKENS_PER_S = 46_000.0
_ENGINE_TOKENS_PER_S = 45_000.0
_DECODE_S = 0.005
_BYTES_PER_S = 4.8e12
_COPY_S, _TRANSFER_S, _STALL_S = 0.01, 0.08, 0.035
# If both sides keep their memory (``bench/results/one-gpu-colocated.json``); and if an engine with
# a KV cache of 90 GB sleeps (``one-gpu-sleeping.json``). Both with 1.5 billion parameters.
_KEPT_S, _HANDOVER_S = 0.01, 0.41
_HOST_BYTES_PER_S = 5e10
# Mean response length as a fraction of the max.
_MEAN_LENGTH = 0.25


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
    handover_s = _KEPT_S
    if moved_bytes is not None:
        handover_s = _HANDOVER_S + 2 * moved_bytes / _HOST_BYTES_PER_S
    fixed_s = _DECODE_S + 2 * weights / _BYTES_PER_S / engine_gpus
    return Rates(
        train_tokens_per_s=_TRAIN_TOKENS_PER_S * _WEIGHTS / active_weights,
        decode=DecodeTime(
            fixed_s=fixed_s, sample_s=0.0, most_samples=fixed_s * _ENGINE_TOKENS_PER_S
        ),
        lengths=Geometric(
            mean_tokens=max(2.0, _MEAN_LENGTH * max_response_tokens), max_tokens=max_response_tokens
        ),
        copy_s=_COPY_S * size,
        transfer_s=_TRANSFER_S * size,
        stall_s=_STALL_S * size,
        handover_s=handover_s,
    )


ASSUMPTIONS = (
    "training: 46,000 response tokens/s of a GPU at 1.31 billion parameters, in proportion to those that a "
    "token passes; each doubling of the trainer's GPUs loses 5 %",
    "generation: 45,000 tokens/s of a rollout at most, a decode step of 5 ms and the time to read the "
    "weights at 4.8 TB/s",
    "responses: geometric, a quarter of rollout.max_response_tokens on average",
    "turns on the same GPUs: 0.01 s of handovers in each step where all of both sides fits; else 0.41 s, "
    "measured with 1.5 billion parameters, and where the trainer's state does not fit beside the engines its "
    "way to host memory and back at 50 GB/s",
    "weights: copied in 10 ms, received in 80, adopted in 35, at 1.31 billion parameters",
)
"""Assumptions without a measurement; all for H200s (``bench/results/e2e-geometric.json``)."""


_SHAPES: Mapping[str, type[Geometric] | type[Lognormal]] = {
    "geometric": Geometric,
    "lognormal": Lognormal,
}
_NUMBERS = {field.name for field in fields(Rates)} - {"decode", "lengths"}
_EXAMPLE = "lengths: {geometric: {mean_tokens: 280, max_tokens: 1024}}"


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
        raise ValueError(
            f"lengths: one shape is needed, but {len(given)} are given; try {_EXAMPLE}"
        )
    ((shape, arguments),) = given.items()
    if shape != "histogram":
        found: Lengths = _made(_SHAPES[shape], arguments, f"lengths.{shape}")
        return found
    counts = _mapping(arguments, "lengths.histogram")
    try:
        return Measured.of({int(bound): int(count) for bound, count in counts.items()})
    except (TypeError, ValueError) as error:
        raise ValueError(f"lengths.histogram: expected tokens and counts: {error}") from error


def _made(kind: type[Any], document: Any, key: str) -> Any:
    given = _mapping(document, key)
    names = {field.name for field in fields(kind)}
    _refuse_others(given, names, key)
    if missing := names - given.keys():
        raise ValueError(f"{key} needs {', '.join(sorted(missing))} as well")
    return kind(**{name: _number(value, f"{key}.{name}") for name, value in given.items()})


def _mapping(document: Any, key: str) -> Mapping[str, Any]:
    if not isinstance(document, Mapping):
        raise ValueError(  # noqa: TRY004 -- what a user wrote
            f"{key}: expected keys and values, but got {document!r}; try {_EXAMPLE}"
        )
    return {str(name): value for name, value in document.items()}


def _refuse_others(given: Mapping[str, Any], known: set[str], key: str) -> None:
    if others := sorted(given.keys() - known):
        raise ValueError(f"{key} has {', '.join(others)}, but knows {', '.join(sorted(known))}")


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} must be a number, but is {value!r}")  # noqa: TRY004 -- as above
    return value
