"""Validates numbers, and numbers by name, that users' code returns. Pure functions."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Final

from services.rollout.failures import CallError

MAX_TERMS: Final = 64
"""Max terms of one reward; each becomes a curve."""
_NAME = re.compile(r"[A-Za-z_][\w.\-/]{0,63}")


def checked_score(value: object, *, bounds: tuple[float, float] | None, name: str) -> float:
    """Returns the value if it is a finite number within the bounds.

    Raises:
        CallError: ``invalid_value`` for anything else.
    """
    try:
        score = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        score = math.inf
    if not math.isfinite(score):
        raise CallError(
            "invalid_value",
            f"reward {name!r} must return a finite number, got {shortened(value)}",
        )
    if bounds is not None and not bounds[0] <= score <= bounds[1]:
        raise CallError(
            "invalid_value",
            f"reward {name!r} must be within [{bounds[0]}, {bounds[1]}], got {score}",
        )
    return score


def named_numbers(value: object, *, what: str, source: str) -> dict[str, float]:
    """Returns numbers by name; a number without a name is called ``reward``.

    Args:
        value: A number, a mapping, or None for no number at all.

    Raises:
        CallError: ``invalid_value`` for anything else.
    """
    if value is None:
        return {}
    if isinstance(value, int | float):
        value = {"reward": value}
    if not isinstance(value, Mapping):
        raise CallError(
            "invalid_value",
            f"{source}: {what} must be a number or numbers by name, got {shortened(value)}",
        )
    checked_names(value, source=f"{what} of {source}")
    return {
        str(name): checked_score(number, bounds=None, name=f"{name} of {source}")
        for name, number in value.items()
    }


def checked_names(names: Iterable[object], *, source: str) -> None:
    """Checks that names are valid for curves.

    Raises:
        CallError: ``invalid_value`` if there are too many, or one is invalid.
    """
    listed = [*names]
    if len(listed) > MAX_TERMS:
        raise CallError(
            "invalid_value", f"{source} has {len(listed)} terms, more than the limit of {MAX_TERMS}"
        )
    for name in listed:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise CallError(
                "invalid_value",
                f"{source} has a term named {name!r:.80}; a name starts with a letter and has up to 64 "
                "letters, digits and _ . - /",
            )


def shortened(value: object) -> str:
    if isinstance(value, int):
        return f"an integer of {value.bit_length()} bits"
    return f"{value!r:.200}"
