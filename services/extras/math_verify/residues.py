r"""Compares expressions that are too large to compute by their values modulo two primes. Pure.

``(1-x)^{2020}`` has too many terms to expand and ``2^{100000}`` too many digits to write, but residues of
both take microseconds. Two different polynomials have the same residue at a point with a probability of at
most their degree divided by the prime (Schwartz 1980, Zippel 1979).
"""

from collections.abc import Callable, Mapping
from functools import reduce
from math import prod
from typing import Any, Final

from sympy import Add, Integer, Mul, Pow, Rational, Symbol, binomial, factorial

_PRIMES: Final = (2**61 - 1, 2**89 - 1)
_GENERATOR: Final = 3
_STRIDE: Final = 1_000_003
_MAX_FACTORS: Final = 20_000
"""Max number of factors of a factorial or a number of combinations."""
_MAX_EXPONENT_BITS: Final = 200
_OPERATIONS: Final[Mapping[Any, Callable[[int, int], int]]] = {Add: int.__add__, Mul: int.__mul__}


def same(first: Any, second: Any) -> bool:
    """Returns True if two rational functions have the same residues; False if one is no rational function."""
    symbols = sorted(
        getattr(first, "free_symbols", set()) | getattr(second, "free_symbols", set()), key=str
    )
    if any(symbol.name == "i" for symbol in symbols):
        return False  # the imaginary unit has no residue
    try:
        for prime in _PRIMES:
            point = {
                symbol: pow(_GENERATOR, _STRIDE * number, prime)
                for number, symbol in enumerate(symbols, start=1)
            }
            if _residue(first, prime, point) != _residue(second, prime, point):
                return False
    except ValueError:
        return False
    return True


def _residue(value: Any, prime: int, point: Mapping[Any, int]) -> int:
    """Returns the value modulo a prime.

    Raises:
        ValueError: If it has none: a function, a root, a quotient by zero, or a too large factorial.
    """
    if isinstance(value, Symbol):
        return point[value]
    if isinstance(value, Rational):
        return int(value.p) * pow(int(value.q), -1, prime) % prime
    if isinstance(value, Pow):
        return pow(_residue(value.base, prime, point), _integer(value.exp), prime)
    if isinstance(value, factorial | binomial):
        return _number_of_ways([_natural(argument) for argument in value.args], prime)
    operation = _OPERATIONS.get(value.func) if isinstance(value, Add | Mul) else None
    if operation is None:
        raise ValueError(f"{type(value).__name__} has no residue")
    residues = [_residue(argument, prime, point) for argument in value.args]
    return reduce(lambda total, residue: operation(total, residue) % prime, residues)


def _number_of_ways(numbers: list[int], prime: int) -> int:
    """Returns the factorial of one number, or the combinations of two."""
    total, chosen = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return _product(1, total, prime)
    chosen = min(chosen, total - chosen)
    if chosen < 0:
        return 0
    above = _product(total - chosen + 1, total, prime)
    return above * pow(_product(1, chosen, prime), -1, prime) % prime


def _natural(value: Any) -> int:
    number = _integer(value)
    if number < 0:
        raise ValueError(f"{number} is negative")
    return number


def _product(first: int, last: int, prime: int) -> int:
    if last - first > _MAX_FACTORS:
        raise ValueError(f"{last - first} factors are too many")
    return reduce(lambda total, factor: total * factor % prime, range(first, last + 1), 1)


def _integer(value: Any) -> int:
    """Returns the value of an integer expression without symbols.

    Raises:
        ValueError: If it is none, or a too large one.
    """
    if isinstance(value, Add | Mul):
        parts = [_integer(argument) for argument in value.args]
        number = sum(parts) if isinstance(value, Add) else prod(parts)
    elif isinstance(value, Pow):
        base, exponent = _integer(value.base), _natural(value.exp)
        if base.bit_length() * exponent > _MAX_EXPONENT_BITS:
            raise ValueError(f"{value} is too large")
        number = base**exponent
    elif isinstance(value, Integer):
        number = int(value)
    else:
        raise ValueError(f"{value} is no integer")  # noqa: TRY004 -- the value is at fault
    if number.bit_length() > _MAX_EXPONENT_BITS:
        raise ValueError(f"an exponent of {number.bit_length()} bits is too large")
    return number
