"""One row of a set of prompts, and its columns."""

from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]
"""Column names to JSON-like values."""


def has_column(row: Row, column: str) -> bool:
    """Whether a row has a column, or the nested one that a dotted name means."""
    if column in row:
        return True
    head, _, rest = column.partition(".")
    return bool(rest) and isinstance(row.get(head), Mapping) and has_column(row[head], rest)


def column_value(row: Row, column: str) -> Any:
    """The value of a column, None if it is missing; ``a.b`` reaches into the nested column ``a``."""
    if column in row or not has_column(row, column):
        return row.get(column)
    head, _, rest = column.partition(".")
    return column_value(row[head], rest)
