"""Compares numbers of sympy: exactly where both are exact, otherwise relative to their size.

``math-verify`` rounds decimals to six places after the point and compares others to an absolute precision,
so all numbers far below one are equal.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from math_verify import grader
from sympy import Float, Integer, MatrixBase, Number, Rational, factorint, log

from services.extras.math_verify.bounds import is_computable

_TOLERANCE: Final = 1.01e-6
"""Relative difference of an approximation, such as 0.333333 of a third."""
_DIGITS: Final = 60
"""Digits to which exact irrational numbers are evaluated."""
_DECIMAL: Final = re.compile(r"[-+]?\d+(?:\.\d+)?|[-+]?\.\d+")
_SAME: Final = 1e-50
_MAX_DIGITS: Final = 15
"""Significant digits up to which a decimal is written in full, so that no other one approximates it."""
_MAX_EXACT_EXPONENT: Final = 10**5


@contextmanager
def relative_comparison() -> Iterator[None]:
    """Lets the library compare numbers with :func:`same_numbers` inside sets, equations and matrices, too."""
    original = grader.sympy_numeric_eq
    grader.sympy_numeric_eq = same_numbers
    try:
        yield
    finally:
        grader.sympy_numeric_eq = original


def same_numbers(first: Any, second: Any, *_: int) -> bool:
    """Returns True if two expressions or matrices are numerically equal; 9 % also equals 9.

    Expressions with variables are equal only if their difference vanishes; the library then compares them
    symbolically.
    """
    if not (is_computable(first) and is_computable(second)):
        return bool(first == second)
    if isinstance(first, MatrixBase) and isinstance(second, MatrixBase):
        return first.shape == second.shape and all(
            map(same_numbers, first.doit().flat(), second.doit().flat())
        )
    per_cents = grader.get_pct_val(first, first), grader.get_pct_val(second, second)
    if all(isinstance(value, Integer) for value in per_cents):
        return bool(per_cents[0] == per_cents[1])
    try:
        if first.is_number and second.is_number:
            return _is_same(first, second)
        return bool((first - second).evalf(n=_DIGITS) == 0)
    except Exception:  # noqa: BLE001 -- sympy raises errors of any type
        return False


def is_rounded(value: Any, decimal: str) -> bool:
    """Returns True if a decimal is a number rounded to the decimal's last digit."""
    if not _DECIMAL.fullmatch(decimal.strip()) or not value.is_number:
        return False
    digits = len(decimal.strip().partition(".")[2])
    difference = abs(value.evalf(n=_DIGITS) - Rational(decimal.strip()))
    return bool(difference <= Rational(1, 2 * 10**digits))


def _is_same(number: Any, other_number: Any) -> bool:
    are_decimal = [value.has(Float) for value in (number, other_number)]
    exact = [_without_floats(value) for value in (number, other_number)]
    first, second = (value.evalf(n=_DIGITS) for value in exact)
    size = max(abs(first).evalf(), abs(second).evalf())
    if not size.is_finite:
        return bool(first == second)
    difference = abs(first - second).evalf()
    if not difference <= _TOLERANCE * size:
        return False
    rationals = [_rational(value, size) for value in exact]
    if None not in rationals and rationals[0] == rationals[1]:
        return True
    if not any(are_decimal):
        return None in rationals and bool(difference <= _SAME * size)
    # A decimal approximates only what no decimal equals.
    return not all(value is not None and _is_written_in_full(value) for value in rationals)


def _without_floats(value: Any) -> Any:
    floats = value.atoms(Float)
    return value.xreplace({number: Rational(str(number)) for number in floats}) if floats else value


def _rational(value: Any, size: Any) -> Any:
    """Returns the value as a ratio of integers; None if it is none, or too large to compute."""
    if size and abs(log(size, 10).evalf()) > _MAX_EXACT_EXPONENT:
        return None
    value = value if isinstance(value, Number) else value.doit()
    return value if isinstance(value, Rational) else None


def _is_written_in_full(value: Any) -> bool:
    """Returns True if a decimal with few digits equals the rational number."""
    if value.q.bit_length() > 200 or {*factorint(value.q)} - {2, 5}:
        return False
    digits = str(abs(value.p) * 10 ** value.q.bit_length() // value.q).strip("0")
    return len(digits) <= _MAX_DIGITS
