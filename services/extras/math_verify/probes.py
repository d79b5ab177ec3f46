"""Compares two expressions or inequalities at sample points, which takes far less time than algebra. Pure.

Values that differ at one point are different, so that algebra only has to confirm what seems equal.
"""

from itertools import combinations
from typing import Any, Final

from math_verify.grader import is_equation, is_relation
from sympy import And, Expr, I, Interval, Poly, Pow, Rational, Set, Union
from sympy.core.relational import Relational

_POINTS: Final = tuple(
    tuple(Rational(number, 1000) for number in point)
    for point in ((737, 1931, 3271, 571, 1289, 2203), (2917, 613, 1453, 1877, 859, 3461))
)
"""Positive values of the symbols, in alphabetical order; further symbols have sums of these."""
_SIZES: Final = (1, 6, 11, 14, 21, 31, 53, 101, 373, 9999)
_LINE: Final = tuple(
    Rational(number, 10) for number in (*_SIZES, *(-size for size in _SIZES), *range(-120, 121, 10))
)
_DIGITS: Final = 15
_TOLERANCE: Final = 1e-5
_UNCLEAR: Final = (1e-7, 1e-2)
"""Relative distances of roots that may be one repeated root, which decimals as coefficients spread."""
_MAX_DEGREE: Final = 5


def differ(gold: Any, answer: Any) -> bool:
    """Returns True if a sample point shows that two values of sympy are different.

    Symbols are positive there, as in the comparison of roots; ``i`` is the imaginary unit.
    """
    if isinstance(gold, Expr) and isinstance(answer, Expr):
        return _expressions_differ(gold, answer)
    if is_equation(gold) and is_equation(answer):
        has_high_degree = any(map(is_of_high_degree, (gold, answer)))
        return gold != answer if has_high_degree else _equations_differ(gold, answer)
    if all(map(_is_region, (gold, answer))):
        return _regions_differ(gold, answer)
    return False


def _expressions_differ(gold: Expr, answer: Expr) -> bool:
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    if not symbols:
        return False
    for point in _POINTS:
        values = _values(symbols, point)
        first, second = (_number(value.xreplace(values)) for value in (gold, answer))
        if first is None or second is None:
            return False
        if not _is_near(first, second):
            return True
    return False


def _equations_differ(gold: Any, answer: Any) -> bool:
    """Returns True if two polynomial equations of the same symbols have other solutions for one of these."""
    symbols = sorted(gold.free_symbols, key=str)
    if len(symbols) < 2 or answer.free_symbols != gold.free_symbols:
        return False
    for point in _POINTS:
        values = _values(symbols[1:], point)
        first, second = (_roots(value.xreplace(values), symbols[0]) for value in (gold, answer))
        if first is None or second is None:
            return False
        for some, others in ((first, second), (second, first)):
            if not all(any(_is_near(root, other) for other in others) for root in some):
                return True
    return False


def _roots(equation: Any, symbol: Any) -> list[complex] | None:
    """Returns the complex solutions of an equation of one symbol; None if they are unclear."""
    try:
        polynomial = Poly(equation.lhs - equation.rhs, symbol)
        roots = [complex(root) for root in polynomial.nroots(n=_DIGITS)]
    except Exception:  # noqa: BLE001 -- sympy raises errors of any type
        return None
    least, most = _UNCLEAR
    pairs = ((abs(a - b), max(abs(a), abs(b))) for a, b in combinations(roots, 2))
    is_unclear = any(least * size < distance < most * size for distance, size in pairs)
    return None if is_unclear else roots


def _values(symbols: list[Any], point: tuple[Any, ...]) -> dict[Any, Any]:
    return {
        symbol: I if str(symbol) == "i" else point[index % len(point)] + index // len(point)
        for index, symbol in enumerate(symbols)
    }


def _is_near(first: complex, second: complex) -> bool:
    return abs(first - second) <= _TOLERANCE * max(abs(first), abs(second))


def _number(value: Any) -> complex | None:
    """Returns the numeric value of an expression without symbols; None if it has none."""
    try:
        number = complex(value.evalf(n=_DIGITS))
    except Exception:  # noqa: BLE001 -- sympy raises errors of any type
        return None
    return number if abs(number) < float("inf") else None


def _is_region(value: Any) -> bool:
    is_inequality = is_relation(value) and not is_equation(value)
    return isinstance(value, Interval | Union) or (is_inequality and len(value.free_symbols) == 1)


def _regions_differ(gold: Any, answer: Any) -> bool:
    for point in _LINE:
        first, second = (_contains(region, point) for region in (gold, answer))
        if None not in (first, second) and first != second:
            return True
    return False


def _contains(region: Any, point: Any) -> bool | None:
    """Returns True if a number is in a set or solves an inequality; None if that is not clear."""
    try:
        if isinstance(region, Set):
            return bool(region.contains(point))
        if isinstance(region, And):
            parts = [_contains(part, point) for part in region.args]
            return None if None in parts else all(parts)
        return _holds(region, point) if isinstance(region, Relational) else None
    except Exception:  # noqa: BLE001 -- sympy raises errors of any type
        return None


def _holds(relation: Any, point: Any) -> bool | None:
    values = dict.fromkeys(relation.free_symbols, point)
    first, second = (_number(side.xreplace(values)) for side in (relation.lhs, relation.rhs))
    if first is None or second is None or first.imag or second.imag:
        return None
    is_near = _is_near(first, second)
    if relation.rel_op == "!=":
        return None if is_near and first != second else first != second
    if is_near:
        return None if first != second else relation.rel_op in ("<=", ">=")
    return (first.real < second.real) == (relation.rel_op in ("<", "<="))


def is_of_high_degree(relation: Any) -> bool:
    """Returns True if an equation or inequality has a power of symbols that algebra may not solve in time."""
    return any(
        abs(float(power.exp)) > _MAX_DEGREE
        for power in relation.atoms(Pow)
        if power.exp.is_Integer and power.base.free_symbols
    )
