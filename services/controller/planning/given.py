"""Rates that a user writes down: any of them, the others stay as they are."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from services.controller.planning.lengths import Geometric, Lengths, Lognormal, Measured
from services.controller.planning.rates import DecodeTime, Rates

_SHAPES: Mapping[str, type[Geometric] | type[Lognormal]] = {
    "geometric": Geometric,
    "lognormal": Lognormal,
}
_NUMBERS = {field.name for field in fields(Rates)} - {"decode", "lengths"}
_EXAMPLE = "lengths: {geometric: {mean_tokens: 280, max_tokens: 1024}}"


def with_given(rates: Rates, document: Any) -> Rates:
    """The rates with those that a document has.

    Args:
        rates: The others.
        document: Read from YAML or JSON.

    Raises:
        ValueError: If it has another key, or what is no rate; the message names the key.
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
