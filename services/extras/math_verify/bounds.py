r"""Bounds of the final answers that are compared, so that no response takes long to judge. Pure.

A policy may write ``9^{9^{9^9}}``, ``99999999!`` or thousands of brackets. Such a response is a wrong answer
where a short number is expected, and is recognized as one before anything parses or computes it: a text by
its length and depth, an expression by the digits and terms that its value would have.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from math import comb, inf, log2
from typing import Any, Final

import sympy

MAX_CHARACTERS: Final = 2000
"""Max length of a final answer and of a line without a mark."""
_MIN_CHARACTERS: Final = 180
_CHARACTERS_PER_EXPECTED: Final = 6
_MAX_DEPTH: Final = 16
_MAX_SIGNS: Final = 12
"""Max number of equal signs such as ``^`` or ``!`` in a run of operators without an operand."""
_MAX_BARS: Final = 8
"""Max number of bars, each of which may open or close an absolute value."""
_MAX_NODES: Final = 400
_MAX_BITS: Final = 50_000
_QUICK_BITS: Final = 128
_MAX_TERMS: Final = 600
_MAX_EXPONENT_TERMS: Final = 20
_MAX_SUMMANDS: Final = 200
_BRACKET: Final = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|([(\[{])|([)\]}])")
_POWERS: Final = re.compile(r"(?:\^[\s{(]*-?(?:[\d.]+|[A-Za-z_]+)[\s})]*){4}")
_OPERATORS: Final = re.compile(rf"(?:[!^_/*|\\+=<>~-]\s*){{{_MAX_SIGNS + 1}}}")
_REPETITION: Final = re.compile(r"(?=.{0,15}?[\\_^(|\[{!])(.{2,16}?)\1{11}")
"""A piece of a formula twelve times in a row."""
_NESTED: Final = re.compile(
    r"(?:\\?(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt)(?:[\s({]|\\left)*){5}|(?:_\s*\{?\w\}?\s*){8}"
    r"|(?:\d+/\d+\s+){16}"
)
"""Functions of functions, indices of indices, or fractions side by side: each doubles the time of parsing."""
_COMMANDS: Final = re.compile(
    r"\\(?:int|iint|oint|sum|prod|lim)(?![A-Za-z])|\\(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|[dt]?frac|[dt]?binom)(?![A-Za-z])"
)
_MAX_COMMANDS: Final = 40
_COMBINATIONS: Final = re.compile(r"\\[dt]?binom\s*\{\s*(\d{5,})\s*\}\s*\{\s*(\d+)\s*\}")
_MAX_COMBINATION_BITS: Final = 4000
_UNCOMPUTED: Final = re.compile(
    r"\\(?:i{0,3}nt|oint|lim)(?![A-Za-z])|\\[dt]?frac\s*\{\s*(?:d|\\partial)\s*(?:\^\s*\{?\d\}?)?\s*\w?\s*\}\s*\{\s*(?:d|\\partial)\s*(?:[A-Za-z]|\\[a-z]+)\s*(?:\^\s*\{?\d\}?\s*)?\}"
)
"""Integral, limit or derivative, which nothing here computes."""
_NO_CHAIN: Final = re.compile(r"[,;<>≤≥≠≈]|\\(?:[lgn]eq?|approx|text)(?![A-Za-z])|\b(?:or|and)\b")
_LARGE_BINOMIAL: Final = re.compile(
    r"binom\s*\{[^{}]*(?:\d{5}|[!^])|(?<![\d.])\d{5,}\s*(?:C\s*\d|choose)|(?<![A-Za-z])C\s*\(\s*\d{5}"
    r"|\d{5,}\}?\s*C\s*_|\\Gamma\s*\(?\s*\d{5}"
)
"""Number of combinations that the library would compute while it parses."""


def with_combinations(text: str) -> str:
    r"""Replaces ``\binom{10000}{2}`` and others of five digits or more by their values, if short."""

    def value(match: re.Match[str]) -> str:
        total, chosen = int(match[1]), int(match[2])
        chosen = min(chosen, total - chosen)
        is_short = 0 <= chosen * total.bit_length() <= _MAX_COMBINATION_BITS
        return str(comb(total, chosen)) if is_short else match[0]

    return _COMBINATIONS.sub(value, text)


def last_value(text: str, expected: str) -> str:
    r"""Returns ``\frac{1}{2}`` for ``\int_0^1 x\,dx = \frac{1}{2}`` and long chains; others as is."""
    is_long = len(text) > max_characters(expected) and not _NO_CHAIN.search(f"{text}{expected}")
    if not (is_long or _UNCOMPUTED.search(text)) or _UNCOMPUTED.search(expected):
        return text
    value = text.rpartition("=")[2]
    return text if value.count("{") != value.count("}") else value


def max_characters(expected: str) -> int:
    """Returns the length up to which a final answer may be the expected one."""
    return min(MAX_CHARACTERS, _MIN_CHARACTERS + _CHARACTERS_PER_EXPECTED * len(expected))


def is_readable(text: str, expected: str) -> bool:
    """Returns True if a text is short and flat enough to parse as an expression.

    Args:
        expected: Expected answer, whose own depth and commands are allowed.
    """
    is_computed = _UNCOMPUTED.search(text) is None or _UNCOMPUTED.search(expected) is not None
    return is_computed and len(text) <= max_characters(expected) and is_flat(text, expected)


def is_flat(text: str, expected: str) -> bool:
    """Returns True if no expression in a text is deep or has many commands, operators or powers of powers."""
    return (
        _depth(text) <= max(_MAX_DEPTH, _depth(expected))
        and len(_COMMANDS.findall(text)) <= max(_MAX_COMMANDS, len(_COMMANDS.findall(expected)))
        and (_POWERS.search(text) is None or _POWERS.search(expected) is not None)
        and (_OPERATORS.search(text) is None or _OPERATORS.search(expected) is not None)
        and (_NESTED.search(text) is None or _NESTED.search(expected) is not None)
        and (_REPETITION.search(text) is None or _REPETITION.search(expected) is not None)
        and _LARGE_BINOMIAL.search(text) is None
        and text.count("|") <= max(_MAX_BARS, expected.count("|"))
    )


def _depth(text: str) -> int:
    """Returns the number of brackets in each other, open or closed."""
    depth = deepest = shallowest = 0
    for bracket in _BRACKET.finditer(text):
        depth += (bracket[1] is not None) - (bracket[2] is not None)
        deepest, shallowest = max(deepest, depth), min(shallowest, depth)
    return deepest - shallowest


def is_computable(value: Any) -> bool:
    """Returns True if an expression of sympy, which is not evaluated yet, has few terms and digits."""
    if not isinstance(value, sympy.Basic | sympy.MatrixBase):
        return True
    items = value.flat() if isinstance(value, sympy.MatrixBase) else [value]
    nodes = 0
    for item in items:
        for _ in _preorder(item):
            nodes += 1
            if nodes > _MAX_NODES:
                return False
    return all(_bits(item) <= _MAX_BITS and _terms(item) <= _MAX_TERMS for item in items)


def _preorder(value: Any) -> Iterator[Any]:
    stack = [value]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(getattr(node, "args", ()))


def _size(power: Any, bits: float) -> float:
    """Returns a bound of the size of a number: its own if that is quick to compute, else that of its bits."""
    if bits <= _QUICK_BITS and not power.free_symbols:
        with suppress(TypeError, ValueError, OverflowError):
            return float(abs(power.evalf()))
    return 2.0**bits if bits < log2(_MAX_BITS) + 1 else inf


def _bits(value: Any) -> float:
    """Returns a bound of the binary digits that numbers of an expression have when they are computed."""
    if isinstance(value, sympy.Number):
        is_ratio = isinstance(value, sympy.Rational)
        return (
            float(max(value.p.bit_length(), value.q.bit_length(), 1))
            if is_ratio
            else _float_bits(value)
        )
    parts = [_bits(argument) for argument in getattr(value, "args", ())]
    if not parts:
        return 2.0
    if isinstance(value, sympy.Pow):
        return (
            max(parts)
            if value.exp.free_symbols
            else max(parts[0], parts[0] * _size(value.exp, parts[1]))
        )
    if isinstance(
        value, sympy.exp | sympy.factorial | sympy.binomial
    ) and not _is_short_exponential(value):
        size = _size(value.args[0], parts[0])
        return size * log2(size + 2) if size < inf else inf
    if isinstance(
        value, sympy.Sum | sympy.Product | sympy.Integral | sympy.Limit | sympy.Derivative
    ) and not _is_short(value):
        return inf
    return sum(parts) if isinstance(value, sympy.Mul) else max(parts) + log2(len(parts))


def _float_bits(value: Any) -> float:
    """Returns the digits before and after the point of a decimal, as bits; one for an infinity."""
    if not isinstance(value, sympy.Float):
        return 1.0
    _, mantissa, exponent, length = value._mpf_
    return 53.0 + abs(exponent + length) if mantissa else 1.0


def _is_short_exponential(value: Any) -> bool:
    """Returns True for a power of e whose exponent has symbols and few terms: no number is computed."""
    is_symbolic = isinstance(value, sympy.exp) and bool(value.free_symbols)
    return is_symbolic and _terms(value.args[0]) <= _MAX_EXPONENT_TERMS


def _is_short(value: Any) -> bool:
    """Returns True for sums and products of few terms; integrals and limits are not computed."""
    if not isinstance(value, sympy.Sum | sympy.Product):
        return False
    lengths = [limits[2] - limits[1] for limits in value.limits if len(limits) == 3]
    return all(length.is_number and abs(length) <= _MAX_SUMMANDS for length in lengths)


def _terms(value: Any) -> float:
    """Returns a bound of the terms that an expression has after its powers and products are expanded."""
    parts = [_terms(argument) for argument in getattr(value, "args", ())]
    if isinstance(value, sympy.Add):
        return sum(parts)
    if isinstance(value, sympy.Mul):
        product = 1.0
        for terms in parts:
            product *= terms
        return product
    if isinstance(value, sympy.Pow) and parts[0] > 1:
        if not value.exp.is_Integer:
            return parts[0]
        power = abs(int(value.exp))
        # The number of ways to choose factors, which grows with the power to the number of terms less one.
        return float(min(parts[0] ** min(power, 40), (power + 1.0) ** min(parts[0] - 1, 40)))
    return max(parts, default=1.0)
