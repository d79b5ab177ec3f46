"""Suggestions for misspelled names."""

from collections.abc import Sequence
from difflib import get_close_matches


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Returns a question with the most similar known name, after a space; empty if none is similar."""
    found = get_close_matches(name, known, n=1, cutoff=0.6)
    return f" Did you mean {found[0]!r}?" if found else ""
