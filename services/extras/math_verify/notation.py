r"""Notation of numbers that ``math-verify`` reads otherwise or not at all, as LaTeX that it reads. Pure.

Each rule applies to expected answers of one kind, so that the same signs keep their meaning beside others:
``C(12,5)`` is a number of combinations where a number is expected, and else may be a point.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final

_NUMBER: Final = re.compile(r"\s*\$?-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)\s*\$?\s*")
_WITH_UNIT: Final = re.compile(r"\s*\$?-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?![\d,.(])[^=<>()]*")
_RATIONAL: Final = re.compile(
    r"[\s$]*-?(?:(?:\d+\s*)?(?:\\[dt]?frac\s*(?:\{\d+\}\s*\{\d+\}|\d\s*\d)|(?<=\s)\d+/\d+)|\d+/\d+|\d*\.\d+)[\s$]*"
)
_WHOLE_AND_FRACTION: Final = re.compile(
    r"(?<![\w.,/}])(\d+)\s*(?:and|\\text\s*\{\s*and\s*\})\s*(?:\\[dt]?frac\s*(?:\{(\d+)\}\s*\{(\d+)\}|(\d)\s*(\d))|(\d+)/(\d+))(?![\d/])"
)
_CONSTANT: Final = re.compile(r"\+\s*C\s*\$?\s*$")
_BASE: Final = re.compile(r"\d\s*_\s*\{?\s*\d+")
_NAMES_OF_BASES: Final[Mapping[str, int]] = {
    name: number
    for number, name in enumerate(
        ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"), start=2
    )
} | {"twelve": 12, "sixteen": 16}
_IN_BASE: Final = re.compile(
    rf"^\s*([\dA-F]+)\s+(?:in\s+)?\(?base[\s-]+(\d+|{'|'.join(_NAMES_OF_BASES)})\)?\s*$"
)
_OWN_CONSTANT: Final = re.compile(r"^(?P<value>.*\+\s*)(?P<name>[A-Za-z])(?P<end>\s*\$?\s*)$")
_COMBINATIONS: Final = re.compile(
    r"(?<![A-Za-z\\\d])C\s*\(\s*(\d+)\s*,\s*(\d+)\s*\)"
    r"|(?:\{\})?[\^_]\s*\{?(\d+)\}?\s*(?:\\text|\\mathrm)?\s*\{?\s*C\s*\}?\s*_\s*\{?(\d+)\}?"
    r"|(?<![\w.])(\d+)\s*C\s*(\d+)(?!\w)|(?<![\w.])(\d+)\s+choose\s+(\d+)(?!\w)"
)
_ARRANGEMENTS: Final = re.compile(
    r"(?<![A-Za-z\\\d])P\s*\(\s*(\d+)\s*,\s*(\d+)\s*\)|(?<![\w.])(\d+)\s*P\s*(\d+)(?!\w)"
    r"|(?:\{\})?[\^_]\s*\{?(\d+)\}?\s*(?:\\text|\\mathrm)?\s*\{?\s*P\s*\}?\s*_\s*\{?(\d+)\}?"
)
_REMAINDER: Final = re.compile(
    r"^(?:(?P<sign>.*\\equiv)|[\s$]*)\s*(?P<number>-?\d{1,100})\s*(?:\\pmod|\\bmod|\\mod|\(\s*\\?b?mod)(?![A-Za-z])"
    r"[\s{]*(?P<modulus>\d{1,100})[\s})$]*$"
)
_DECIMAL_COMMA: Final = re.compile(
    r"^(\s*\$?-?\d+),(\d{1,2}|\d{4,})(?![\d,])(?=\s*(?:[A-Za-z\\$%°€£.]|$))"
)


def _combinations(match: re.Match[str]) -> str:
    total, chosen = (group for group in match.groups() if group)
    return f"\\binom{{{total}}}{{{chosen}}}"


def _arrangements(match: re.Match[str]) -> str:
    total, chosen = (group for group in match.groups() if group)
    return f"\\frac{{{total}!}}{{({total}-{chosen})!}}"


def _remainder(match: re.Match[str]) -> str:
    is_reduced = match["sign"] or 0 <= int(match["number"]) < int(match["modulus"])
    return match["number"] if is_reduced else match[0]


def _mixed_number(match: re.Match[str]) -> str:
    whole, above, below = (group for group in match.groups() if group)
    return f"{whole}\\frac{{{above}}}{{{below}}}"


def _interval(match: re.Match[str]) -> str:
    opening, ends, closing = match.groups()
    return f"{'(' if opening == ']' else '['}{ends}{')' if closing == '[' else ']'}"


def _in_base(match: re.Match[str]) -> str:
    return f"{match[1]}_{{{_NAMES_OF_BASES.get(match[2], match[2])}}}"


def _constant(match: re.Match[str]) -> str:
    is_other_name = match["name"] in re.sub(r"\\[A-Za-z]+", "", match["value"])
    return match[0] if is_other_name else f"{match['value']}C{match['end']}"


_INTERVAL: Final = re.compile(r"\s*\$?(?:\\left)?[(\[][^()\[\]]+,[^()\[\]]+[)\]]\$?\s*")
_OUTWARD_BRACKETS: Final = re.compile(r"^\s*\$?([\[\]])([^()\[\]]+,[^()\[\]]+)([\[\]])\$?\s*$")
_RULES: Final[
    tuple[tuple[re.Pattern[str], re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]
] = (
    (_NUMBER, _COMBINATIONS, _combinations),
    (_NUMBER, _ARRANGEMENTS, _arrangements),
    (_NUMBER, _REMAINDER, _remainder),
    (_WITH_UNIT, _DECIMAL_COMMA, r"\1.\2"),
    (_RATIONAL, _WHOLE_AND_FRACTION, _mixed_number),
    (_INTERVAL, _OUTWARD_BRACKETS, _interval),
    (_BASE, _IN_BASE, _in_base),
    (_CONSTANT, _OWN_CONSTANT, _constant),
)
"""Pattern of the expected answer, notation of the candidate, and what replaces it."""


def rewritten(expected: str, candidate: str) -> str:
    """Returns a candidate in notation that the library reads, as far as the expected answer allows it."""
    for kind, notation, replacement in _RULES:
        is_of_kind = (
            kind.search(expected) if kind in (_BASE, _CONSTANT) else kind.fullmatch(expected)
        )
        if is_of_kind:
            candidate = notation.sub(replacement, candidate)
    return candidate


_FUNCTION: Final = re.compile(r"^\s*\$?\s*([A-Za-z])\s*\(\s*([A-Za-z])\s*\)\s*=(?!=)([^=<>]+)$")
_ARGUMENT: Final = re.compile(r"^\s*\$?\s*[A-Za-z]\s*\(([^()=]*[^()=\s\w][^()=]*)\)\s*=")
_LETTER: Final = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")


def renamed(expected: str, candidate: str) -> str | None:
    """Returns the value of ``f(t) = t^2`` with the variable of the expected ``x^2`` or ``f(x) = x^2``.

    Returns:
        The candidate as it is if it is no function; None if it is another function: ``f(t) = x^2``.
    """
    if _ARGUMENT.match(candidate) and not _ARGUMENT.match(expected):
        return None
    function = _FUNCTION.match(candidate)
    expected_function = _FUNCTION.match(expected)
    value = expected_function[3] if expected_function else expected
    letters = {*_LETTER.findall(value)} - {"e", "i"}
    variable = expected_function[2] if expected_function else next(iter(letters), "")
    if (
        function is None
        or "=" in value
        or len(letters) != 1
        or not variable
        or variable == function[2]
    ):
        return candidate
    if expected_function and expected_function[1] != function[1]:
        return candidate
    if {*_LETTER.findall(function[3])} - {"e", "i"} - {function[2]}:
        return None
    new_value = re.sub(rf"(?<![A-Za-z\\]){function[2]}(?![A-Za-z])", variable, function[3])
    return f"{function[1]}({variable}) = {new_value}" if expected_function else new_value
