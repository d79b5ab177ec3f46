r"""1 if the response's final expression equals the answer mathematically, else 0.

``math-verify`` looks for expressions in prose and takes those that it can read: of a bare ``2\sqrt{3}``
or ``(3,1)`` only ``2`` and ``1``. So the answer and the response's final part reach it inside
``\boxed{}``, which it reads as a whole.
"""

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.errors import TimeoutException
from math_verify.grader import (
    FiniteSet,
    is_assignment_relation,
    is_equation,
    is_relation,
    unwrap_eq,
)
from math_verify.utils import timeout
from sympy import Abs, Add, Eq, Expr, I, Interval, MatrixBase, Symbol, Tuple, Union

from services.rollout.rewards import math_spelling as spelling

_MARK = "####"
_BOX = "\\boxed{"
_BETWEEN_BOXES = re.compile(
    r"[\s$.)\\]*(?:[,;]|(?:[,;]\s*)?(?:and|or|\\text\s*\{\s*(?:and|or)\s*\}))[\s$(\\]*(?:\w+\s*=)?\s*"
)
_ANNOUNCED = re.compile(
    r"\b(?:answer|result)(?:\s+is)?\s*[:=]?\s*(\S.*?)\s*\.?\s*$", re.IGNORECASE | re.MULTILINE
)
_SAID = re.compile(r"\b(?:is|are|was|were|be)\s+(\S.*?)[\s.]*$")
_WITHOUT_UNITS = replace(LatexExtractionConfig().normalization_config, units=False)
_READ = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=_WITHOUT_UNITS)]
_SEARCH = [*_READ, ExprExtractionConfig()]
_SEARCH_UNITS = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
_PATIENCE_S = 5
"""What the library grants one expression to be read or compared."""
_in_time = timeout(_PATIENCE_S)
_MOST_PARTS = 4
"""Inequalities of which one holds; each is granted its time."""
_LONGEST = 2000
"""Characters of a final answer; what repeats itself for longer is none, and would be read for minutes."""


def math_answer(prompt: str, response: str, answer: Any, row: Mapping[str, Any]) -> float:
    r"""Compare final answers.

    An answer in GSM8K's form, a derivation that ends in ``#### 72``, counts as what follows the mark. The
    response's final answer is its last ``\boxed{}``, with those that a comma or ``and`` joins to it, else
    what follows its last mark, else what it announces as its answer, else the last expression in it.

    Raises:
        ValueError: If there is no answer, or it is empty.
    """
    if answer is None:
        raise ValueError("math_verify needs an answer; set data.answer_column")
    marked = _marked(str(answer))
    expected = str(answer).strip() if marked is None else marked
    if not spelling.as_text(expected):
        raise ValueError(f"math_verify finds no expression in the answer {str(answer)[-80:]!r}")
    given = _marked(response)
    if given is not None:
        return float(_same(expected, given))
    announced = _ANNOUNCED.findall(response)
    given = announced[-1].strip("* ") if announced else response
    if announced and not spelling.has_words(given):
        return float(_same(expected, given))
    said = _SAID.search(given)
    if spelling.same_text(expected, given) or (said and spelling.same_text(expected, said[1])):
        return 1.0
    gold = [] if spelling.is_text(expected) else _read(expected)
    return float(
        _any_in_time(_verify(gold, parse(given, wanted)) for wanted in (_SEARCH, _SEARCH_UNITS))
    )


def _marked(text: str) -> str | None:
    """The final answer that a text marks."""
    start = text.rfind(_BOX)
    if start < 0:
        return text.rpartition(_MARK)[2].strip() if _MARK in text else None
    boxes = [_braced(text[start + len(_BOX) :])]
    while (before := text.rfind(_BOX, 0, start)) >= 0:
        box = _braced(text[before + len(_BOX) : start])
        end = before + len(_BOX) + len(box) + 1
        if end > start or not _BETWEEN_BOXES.fullmatch(text, end, start):
            break
        boxes.insert(0, box)
        start = before
    return ", ".join(dict.fromkeys(boxes))


def _braced(text: str) -> str:
    """Text up to the brace that closes what was open before it."""
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:place]
    return text


def _same(expected: str, given: str) -> bool:
    if spelling.same_text(expected, given):
        return True
    (wanted, value), (chosen, given_value) = spelling.choice(expected), spelling.choice(given)
    if wanted and chosen and (value or given_value):
        return wanted == chosen
    expected, given = value or expected, given_value or given
    bare = spelling.without_condition(expected), spelling.without_condition(given)
    if (bare[0] == expected) != (bare[1] == given) or spelling.same_text(
        expected[len(bare[0]) :], given[len(bare[1]) :]
    ):
        expected, given = bare
    ratios = spelling.ratio_as_fraction(expected), spelling.ratio_as_fraction(given)
    if (ratios[0] is None) != (ratios[1] is None):
        expected, given = ratios[0] or expected, ratios[1] or given
    if spelling.same_text(expected, given):
        return True
    return not spelling.is_text(expected) and _same_value(expected, given)


def _same_value(expected: str, given: str) -> bool:
    bases = {base for each in (expected, given) if (base := spelling.base(each))}
    if len(bases) > 1 or len(given) > _LONGEST:
        return False
    if spelling.has_magnitude(expected) and spelling.has_magnitude(given):
        expected, given = spelling.with_magnitude(expected), spelling.with_magnitude(given)
    # "Which per cent?" is answered by 25 as well as by 25 %.
    ways = (str, spelling.without_per_cent, spelling.with_magnitude, spelling.in_radians)
    pairs = [(way(expected), way(given)) for way in ways]
    return _any_in_time(_verify(_read(one), _read(other)) for one, other in dict.fromkeys(pairs))


def _any_in_time(attempts: Iterable[bool]) -> bool:
    """Whether one succeeds; what took long is not attempted in further ways."""
    end = time.monotonic() + _PATIENCE_S
    for succeeds in attempts:
        if succeeds or time.monotonic() > end:
            return succeeds
    return False


def _read(answer: str) -> list[Any]:
    parts = spelling.alternatives(answer)
    if 1 < len(parts) <= _MOST_PARTS and (union := _union(parts)):
        return union
    latex = spelling.as_latex(answer)
    for each in (latex, *spelling.rewritten(latex)):
        if found := parse(f"{_BOX}{each}}}", _READ, fallback_mode="no_fallback"):
            return list(found)
    return []


def _union(parts: list[str]) -> list[Any]:
    """The numbers that fulfil one of several inequalities, if the parts are such."""
    found = [one for part in parts for one in _read(part)]
    return [] if len(found) < len(parts) else _solutions(*found)


def _solutions(*found: Any) -> list[Any]:
    if not all(is_relation(one) and not is_equation(one) for one in found):
        return []
    try:
        return [_in_time(lambda: Union(*(one.as_set() for one in found)))()]
    except (NotImplementedError, ValueError, TypeError, TimeoutException):  # not of one variable
        return []


def _verify(gold: list[Any], found: list[Any]) -> bool:
    return any(_equal(one, other) for one in gold for other in found)


def _equal(gold: Any, found: Any) -> bool:
    if isinstance(gold, Tuple | Interval) or isinstance(found, Tuple | Interval):
        gold, found = _vector(gold), _vector(found)
    if isinstance(gold, Eq) and isinstance(gold.lhs, Add) and isinstance(found, Expr):
        return False  # an equation, not the value of its right side
    if verify(gold, found, allow_set_relation_comp=True):
        return True
    solutions = _solutions(gold), _solutions(found)
    if all(solutions):
        return bool(solutions[0] == solutions[1])
    if not (isinstance(gold, Expr) and isinstance(found, Expr)) or gold.has(Abs) or found.has(Abs):
        return False
    general = gold.free_symbols | found.free_symbols
    if not general:
        return False
    known = {symbol: _particular(symbol) for symbol in general}
    return bool(verify(gold.xreplace(known), found.xreplace(known)))


def _vector(value: Any) -> Any:
    """What a tuple may be written as: a vector, or a value for each name, in the order of these."""
    if isinstance(value, MatrixBase) and 1 in value.shape:
        return Tuple(*value)
    if isinstance(value, FiniteSet) and all(is_assignment_relation(one) for one in value):
        return Tuple(*(unwrap_eq(one) for one in value._unsorted_args))  # noqa: SLF001
    return value


def _particular(symbol: Any) -> Any:
    r"""What a letter stands for: the imaginary unit, or a number of which ``\sqrt[3]{x^2}`` is a power."""
    return I if symbol.name == "i" else Symbol(symbol.name, positive=True)
