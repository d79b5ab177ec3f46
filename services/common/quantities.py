"""Quantities as texts for people."""

from typing import Final

_UNITS: Final = ("B", "kB", "MB", "GB", "TB")
_STEP: Final = 1000


def size_text(num_bytes: float) -> str:
    """Returns a number of bytes in the decimal unit that gives it one to three digits before the point."""
    size, power = float(num_bytes), 0
    # A size that would be rounded to 1,000 is given in the next unit.
    while round(size, 1) >= _STEP and power < len(_UNITS) - 1:
        size, power = size / _STEP, power + 1
    return f"{size:.1f} {_UNITS[power]}" if power else f"{size:.0f} {_UNITS[0]}"
