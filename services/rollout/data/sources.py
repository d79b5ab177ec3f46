"""Sources of prompts: files, datasets, functions and environments as rows by index, with filters."""

import inspect
import json
import os
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import regex

from services.common.callables import announced, describe_error, load_callable
from services.common.runspec.base import did_you_mean
from services.common.runspec.data import SOURCES, DataSpec, FilterSpec, PromptSourceSpec

Row = Mapping[str, Any]
"""Mapping of column names to JSON-like values."""


def has_column(row: Row, column: str) -> bool:
    """Returns True if a row has a column; a dotted name may refer to a nested one."""
    if column in row:
        return True
    head, _, rest = column.partition(".")
    return bool(rest) and isinstance(row.get(head), Mapping) and has_column(row[head], rest)


def column_value(row: Row, column: str) -> Any:
    """Returns the value of a column, None if it is missing; ``a.b`` reads ``b`` of the column ``a``."""
    if column in row or not has_column(row, column):
        return row.get(column)
    head, _, rest = column.partition(".")
    return column_value(row[head], rest)


# Both the pattern and the text come from users.
_PATTERN_TIMEOUT_S = 1.0
_MAX_GENERATED = 1_000_000
"""Max rows of an iterable, which are all held in memory."""
_Keeps = Callable[[Row], object]


class PromptSource(Protocol):
    """Rows of one source by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row:
        """Returns one row. Raises ValueError if the row is damaged."""


def filtered_rows(rows: PromptSource, filters: Sequence[FilterSpec], *, key: str) -> "array[int]":
    """Returns the indices of the rows that pass all filters.

    A damaged row is kept here and refused when its prompt is dispatched.

    Args:
        rows: All rows of the set; at least one.

    Raises:
        ValueError: If a filter cannot be applied, or no row passes; the message names the filter.
    """
    named_filters = [(f"{key}.filters.{index}", spec) for index, spec in enumerate(filters)]
    tests = [(name, _test(spec, name, rows[0])) for name, spec in named_filters]
    indices = array("q")
    for index in range(len(rows)):
        try:
            row = rows[index]
        except ValueError:
            indices.append(index)
            continue
        if all(_passes(keeps, row, f"{name}: row {index}") for name, keeps in tests):
            indices.append(index)
    if not indices:
        raise ValueError(
            f"{key}.filters leave none of {len(rows):,} rows; relax one of them, or remove the set"
        )
    return indices


def _passes(keeps: _Keeps, row: Row, origin: str) -> bool:
    try:
        answer = keeps(row)
    except (Exception, SystemExit) as error:  # may be user code
        raise ValueError(f"{origin}: the filter failed with {describe_error(error)}") from error
    if not isinstance(answer, bool):
        raise ValueError(  # noqa: TRY004 -- the function is wrong, not an argument's type
            f"{origin}: a filter must return True or False, but returned {answer!r:.60}"
        )
    return answer


def _test(spec: FilterSpec, key: str, first: Row) -> _Keeps:
    if spec.function is not None:
        return _function(spec.function, spec.arguments, key)
    assert spec.column is not None, "a filter has a column or a function"
    if not has_column(first, spec.column):
        raise ValueError(
            f"{key}.column is {spec.column!r}, but the rows have the columns "
            f"{', '.join(map(repr, first)) or 'none'}; use one of them"
        )
    column = spec.column
    return lambda row: _fits(spec, column_value(row, column))


def _function(reference: str, arguments: Mapping[str, Any], key: str) -> _Keeps:
    try:
        function = load_callable(reference)
        inspect.signature(function).bind({}, **arguments)
    except (ValueError, ImportError) as error:
        raise ValueError(f"{key}.function: {error}") from error
    except TypeError as error:
        raise ValueError(
            f"{key}.function: {reference!r} cannot be called with a row and {sorted(arguments)} ({error}); "
            f"change the function, or {key}.arguments"
        ) from error
    return lambda row: function(row, **arguments)


def _fits(spec: FilterSpec, value: object) -> bool:
    """Returns True if a column's value passes a filter; values of another type do not pass."""
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


def _is_within(number: float | None, least: float | None, upper: float | None) -> bool:
    """Returns True if a number is within the bounds; None passes only without bounds."""
    if number is None:
        return least is None and upper is None
    return (least is None or number >= least) and (upper is None or number <= upper)


def _length(value: Sized) -> int:
    """Returns the characters of a text or of all messages of a chat, or the number of items otherwise."""
    if isinstance(value, Sequence) and all(isinstance(message, Mapping) for message in value):
        return sum(len(str(message.get("content", ""))) for message in value)
    return len(value)


class OpenSource(Protocol):
    """Opens a kind of source (door ``slipstream.prompt_sources``)."""

    def __call__(self, spec: PromptSourceSpec, key: str, /) -> PromptSource:
        """Returns all rows of a set.

        Args:
            key: Key of the set, with which messages begin.

        Raises:
            ValueError: If the set cannot be opened; the message has the key, the actual value and the fix.
        """


def _opener(kind: str, key: str) -> OpenSource:
    try:
        return load_callable(SOURCES[kind])
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"{key}.source: {kind!r} cannot be loaded ({error}); repair or uninstall "
            f"{SOURCES.provider(kind).package}"
        ) from error


def open_sources(data: DataSpec, *, needs_answers: bool = False) -> dict[str, PromptSource]:
    """Opens all sets of a run and checks their columns; returns them by split.

    Args:
        needs_answers: As in :func:`open_source`.

    Raises:
        ValueError: If a source is missing, empty or lacks a column; the message has the key, the
            actual value and the fix.
    """
    return {
        split: open_source(spec, data, key=f"data.{split}", needs_answers=needs_answers)
        for split, spec in data.sets.items()
    }


def open_source(
    spec: PromptSourceSpec,
    data: DataSpec,
    *,
    key: str,
    has_columns: bool = True,
    needs_answers: bool = False,
) -> PromptSource:
    """Opens one source, applies its filters and limit, and checks the columns of its first row.

    Args:
        needs_answers: True if the run's rules refuse null as ``data.answer_column``.

    Raises:
        ValueError: As in :func:`open_sources`; with one line for each missing column.
    """
    source = _opener(spec.source, key)(spec, key)
    if len(source) == 0:
        raise ValueError(f"{key}: {spec.path!r} has no rows; use a source with at least one prompt")
    if spec.filters:
        source = _ChosenRows(source, filtered_rows(source, spec.filters, key=key))
    if spec.limit is not None:
        source = _ChosenRows(source, range(min(spec.limit, len(source))))
    if spec.source == "environment":  # the environment provides the prompt
        return source
    columns = {_column_key("prompt_column", spec, key): data.prompt_column_of(spec)}
    if (answers := data.answer_column_of(spec)) is not None:
        columns[_column_key("answer_column", spec, key)] = answers
    if data.model_inputs_column is not None:
        columns["data.model_inputs_column"] = data.model_inputs_column
    try:
        row = source[0]
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    nullable = {"data.model_inputs_column"}
    if not needs_answers:
        nullable.add("data.answer_column")
    missing_files = [
        f"{option} is {column!r}, but the rows of {key} ({spec.path!r}) have the columns "
        f"{', '.join(map(repr, row)) or 'none'}; set {option} to one of them"
        + (" or to null" if option in nullable else "")
        + did_you_mean(column, tuple(row)).replace(" Did", ". Did")
        for option, column in columns.items()
        if has_columns and not has_column(row, column)
    ]
    if missing_files:
        raise ValueError("\n".join(missing_files))
    return source


def _column_key(name: str, spec: PromptSourceSpec, key: str) -> str:
    """Returns the configuration key that names a column of a set."""
    return f"data.{name}" if getattr(spec, name) is None else f"{key}.{name}"


class _ChosenRows:
    """Selected rows of another source."""

    def __init__(self, source: PromptSource, indexes: Sequence[int]) -> None:
        self._source = source
        self._chosen = indexes

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int, /) -> Row:
        return self._source[self._chosen[index]]


class _DuplicateKeyError(Exception):
    """Reports that an object of a row has a key twice; :mod:`json` would keep only the last value."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise _DuplicateKeyError(repr(key))
    return entries


class _JsonLines:
    """A JSONL file that is read row by row; only the offsets of the rows are kept in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets = array("q")
        offset = 0
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    self._offsets.append(offset)
                offset += len(line)
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        self._size = offset

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int, /) -> Row:
        begin = self._offsets[index]
        is_last = begin == self._offsets[-1]
        end = self._size if is_last else self._offsets[index + 1]
        # pread, because threads read concurrently and a file has only one position.
        line = os.pread(self._file, end - begin, begin)
        try:
            row = json.loads(line, object_pairs_hook=_object)
        except _DuplicateKeyError as error:
            raise ValueError(
                f"row {index} of {self._path} has the key {error} more than once; keep one of its values"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"row {index} of {self._path} is not valid JSON ({error}): {line[:80]!r}; expected one JSON "
                "object per line"
            ) from error
        return _as_row(row, index, str(self._path))


class CheckedRows:
    """Rows of a library or of a user's function."""

    def __init__(self, rows: Sequence[Any], name: str) -> None:
        self._rows = rows
        self._name = name

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> Row:
        try:
            row = self._rows[index]
        except (Exception, SystemExit) as error:  # may be user code
            raise ValueError(
                f"row {index} of {self._name} raised {describe_error(error)}; correct the rows"
            ) from error
        return _as_row(row, index, self._name)


def _as_row(row: object, index: int, name: str) -> Row:
    if not isinstance(row, Mapping):
        raise ValueError(  # noqa: TRY004 -- the data is wrong, not an argument's type
            f"row {index} of {name} must be an object of columns (one per line), got {type(row).__name__}"
        )
    return row


def file_of(spec: PromptSourceSpec, key: str) -> Path:
    """Returns the file of a set. Raises ValueError, with the key, if it does not exist."""
    path = Path(spec.path)
    if not path.is_file():
        raise ValueError(
            f"{key}.path: file {spec.path!r} not found (working directory {Path.cwd()}); check the path"
        )
    return path


def open_jsonl(spec: PromptSourceSpec, key: str) -> PromptSource:
    return _JsonLines(file_of(spec, key))


def open_python(spec: PromptSourceSpec, key: str) -> PromptSource:
    try:
        function = load_callable(spec.path)
    except (ValueError, ImportError) as error:
        raise ValueError(f"{key}.path: {error}") from error
    try:
        with announced(spec.path):
            rows = function(**spec.arguments)
    except (Exception, SystemExit) as error:  # user code
        trace = error.__traceback__
        if isinstance(error, TypeError) and trace is not None and trace.tb_next is None:
            raise ValueError(
                f"{key}: {spec.path!r} could not be called with {dict(spec.arguments)} ({error}); check "
                f"{key}.arguments"
            ) from error
        raise _raised(spec, key, error) from error
    # A mapping of columns and a text have a length and items, but no rows.
    has_no_rows = isinstance(rows, Mapping | str | bytes)
    if isinstance(rows, Sized) and hasattr(rows, "__getitem__") and not has_no_rows:
        return CheckedRows(rows, spec.path)  # type: ignore[arg-type]  # any sequence class
    if isinstance(rows, Iterable) and not has_no_rows:
        try:
            with announced(spec.path):
                generated = list(islice(rows, _MAX_GENERATED + 1))
        except (Exception, SystemExit) as error:  # user code: a generator runs here
            raise _raised(spec, key, error) from error
        if len(generated) > _MAX_GENERATED:
            raise ValueError(
                f"{key}: {spec.path!r} yields more than {_MAX_GENERATED:,} rows, or never ends; end it, or "
                "return an object with __len__ and __getitem__, whose rows are read one at a time"
            )
        return CheckedRows(generated, spec.path)
    raise ValueError(
        f"{key}: {spec.path!r} must return the rows, for example a list of dictionaries, got "
        f"{type(rows).__name__}"
    )


def _raised(spec: PromptSourceSpec, key: str, error: BaseException) -> ValueError:
    return ValueError(f"{key}: {spec.path!r} raised {describe_error(error)}; correct the function")
