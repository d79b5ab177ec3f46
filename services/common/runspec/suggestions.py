"""Suggestions for misspelled names."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TypeVar

_Entry = TypeVar("_Entry")


def look_up(table: Mapping[str, _Entry], name: str, *, key: str) -> _Entry:
    """Returns the entry of a table that the value of a key names.

    Raises:
        ValueError: If there is no such entry; the message has the key, the known names and the value.
    """
    if name not in table:
        raise ValueError(
            f"{key} must be one of {', '.join(map(repr, table))}, got {name!r}."
            + did_you_mean(name, tuple(table))
        )
    return table[name]


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Returns a question with the most similar known name, after a space; empty if none is similar."""
    found = get_close_matches(name, known, n=1, cutoff=0.6)
    return f" Did you mean {found[0]!r}?" if found else ""
