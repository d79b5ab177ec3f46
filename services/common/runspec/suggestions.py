"""What somebody may have meant who wrote a name that there is not."""

from collections.abc import Sequence
from difflib import get_close_matches


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """A question that begins with a space; empty if nothing is like it."""
    found = get_close_matches(name, known, n=1, cutoff=0.6)
    return f" Did you mean {found[0]!r}?" if found else ""
