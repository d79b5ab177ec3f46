"""Rows that are left out of a set of prompts: by a column's value or length, or by the user's function."""

import inspect
from array import array
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, Protocol

import regex

from services.common.callables import load_callable
from services.common.spec.data import FilterSpec
from services.rollout.rows import Row, column_value, has_column

# The pattern is somebody else's, and so is the text.
_PATTERN_TIMEOUT_S = 1.0
_Keeps = Callable[[Row], object]


class Rows(Protocol):
    """Rows by index."""

    def __len__(self) -> int:
        """Number of rows."""

    def __getitem__(self, index: int, /) -> Row:
        """Return one row. Raises ValueError if the row is damaged."""


def kept_rows(rows: Rows, filters: Sequence[FilterSpec], *, key: str) -> "array[int]":
    """Numbers of the rows that pass all filters; a damaged row stays, and is refused when it is issued.

    Args:
        rows: All of the set, of which there is at least one.
        filters: What they must pass.
        key: Key of the set, for messages.

    Raises:
        ValueError: If a filter cannot be applied, or no row passes; the message names the filter.
    """
    named = [(f"{key}.filters.{index}", spec) for index, spec in enumerate(filters)]
    tests = [(name, _test(spec, name, rows[0])) for name, spec in named]
    kept = array("q")
    for index in range(len(rows)):
        try:
            row = rows[index]
        except ValueError:
            kept.append(index)
            continue
        if all(_passes(keeps, row, f"{name}: row {index}") for name, keeps in tests):
            kept.append(index)
    if not kept:
        raise ValueError(
            f"{key}.filters leave none of {len(rows):,} rows; relax one of them, or remove the set"
        )
    return kept


def _passes(keeps: _Keeps, row: Row, place: str) -> bool:
    try:
        answer = keeps(row)
    except Exception as error:  # it may be the user's code
        raise ValueError(
            f"{place}: the filter failed with {type(error).__name__}: {error}"
        ) from error
    if not isinstance(answer, bool):
        raise ValueError(  # noqa: TRY004 -- the function is wrong, not an argument's type
            f"{place}: a filter must return True or False, but returned {answer!r:.60}"
        )
    return answer


def _test(spec: FilterSpec, key: str, first: Row) -> _Keeps:
    if spec.function is not None:
        return _function(spec.function, spec.arguments, key)
    assert spec.column is not None, "a filter has a column or a function"
    if not has_column(first, spec.column):
        raise ValueError(
            f"{key}.column is {spec.column!r}, but the rows have the columns "
            f"{', '.join(map(repr, first)) or 'none'}; name one of them"
        )
    column = spec.column
    return lambda row: _fits(spec, column_value(row, column))


def _function(reference: str, arguments: Mapping[str, Any], key: str) -> _Keeps:
    try:
        function = load_callable(reference)
        inspect.signature(function).bind({}, **arguments)
    except (ValueError, ImportError, SyntaxError) as error:
        raise ValueError(f"{key}.function: {error}") from error
    except TypeError as error:
        raise ValueError(
            f"{key}.function: {reference!r} cannot be called with a row and {sorted(arguments)} ({error}); "
            f"change the function, or {key}.arguments"
        ) from error
    return lambda row: function(row, **arguments)


def _fits(spec: FilterSpec, value: object) -> bool:
    """Whether a column's value is as a filter says; one of another kind is not."""
    if spec.one_of is not None and value not in spec.one_of:
        return False
    number = value if isinstance(value, int | float) else None
    length = _length(value) if isinstance(value, Sized) else None
    if not _is_within(number, spec.at_least, spec.at_most):
        return False
    if not _is_within(length, spec.min_length, spec.max_length):
        return False
    if spec.matches is None:
        return True
    return isinstance(value, str) and bool(
        regex.search(spec.matches, value, timeout=_PATTERN_TIMEOUT_S)
    )


def _is_within(number: float | None, least: float | None, most: float | None) -> bool:
    """Whether a number is there, if there are bounds, and within them."""
    if number is None:
        return least is None and most is None
    return (least is None or number >= least) and (most is None or number <= most)


def _length(value: Sized) -> int:
    """Characters of a text, or of all messages of a chat; items of anything else."""
    if isinstance(value, Sequence) and all(isinstance(part, Mapping) for part in value):
        return sum(len(str(part.get("content", ""))) for part in value)
    return len(value)
