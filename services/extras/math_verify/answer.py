r"""Reward of 1 if the response's final expression equals the answer mathematically, else 0.

``math-verify`` searches prose for expressions and takes those that it can parse: from a bare
``2\sqrt{3}`` or ``(3,1)`` only ``2`` and ``1``. The answer and the response's final part are
therefore passed to it inside ``\boxed{}``, which it parses completely.
"""

import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import math_verify
from math_verify import ExprExtractionConfig, LatexExtractionConfig
from math_verify.grader import (
    FiniteSet,
    is_assignment_relation,
    is_equation,
    is_relation,
    take_last_relation,
    unwrap_eq,
)
from sympy import Abs, Add, Eq, Expr, I, Intersection, Interval, MatrixBase, Symbol, Tuple, Union

from services.extras.math_verify import (
    asked,
    beside,
    bounds,
    dates,
    notation,
    probes,
    quantities,
    question,
    residues,
    spelling,
    subjects,
    units,
)
from services.extras.math_verify.numbers import is_rounded, relative_comparison, same_numbers
from services.rollout.rewards.answers import answer_part, answer_text

_MARK = "####"
_BOX = "\\boxed{"
_BARE_BOX = re.compile(r"\\f?boxed(?:\s+|(?=\d))(-?\d[\d.,]*(?<![.,])|\\\w+|\w)")
_BETWEEN_BOXES = re.compile(
    r"[\s$.)\\]*(?:[,;]|(?:[,;]\s*)?(?:and|or|\\text\s*\{\s*(?:and|or)\s*\}))[\s$(\\]*(?:\w+\s*=)?\s*"
)
_TAG = re.compile(r"(?i)<(/?)answer>")
_SAID_CHOICE = re.compile(
    r"(?i)^.*\b(?:is|be|I\s+(?:choose|pick|select))\s+(?:(?:option|choice)\s+)?(?=\(?[A-J]\b)"
)
_ANNOUNCED = re.compile(
    r"\b(?:answer|result)(?:\s+is)?\s*[:=]?\s*(\S.*?)\s*\.?\s*$", re.IGNORECASE | re.MULTILINE
)
_SAID = re.compile(r"\b(?:is|are|was|were|be)\s*:?\s+(\S.*?)[\s.]*$")
_PREPOSITION = re.compile(r"^(?:on|at|in)\s+")
_WITHOUT_UNITS = replace(LatexExtractionConfig().normalization_config, units=False)
_READ = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=_WITHOUT_UNITS)]
_SEARCH = [*_READ, ExprExtractionConfig()]
_SEARCH_UNITS = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
_LETTER = re.compile(r"[A-Za-z]")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_LAST_QUANTITY = re.compile(r"([-+]?(?<![\d.,])[\d.,]*\d[^\d]*(?:\^?\{?[23]\}?)?)[\s.!]*$")
_GROUPED = re.compile(r"-?\d{1,3}(?:(?:,\d{2})*,\d{3})+(?:\.\d+)?")
_NUMBER_OF_NAME = re.compile(r"\$?(?:[a-z]\s*=\s*)?-?[\d.,]+\$?")
_NAME_OF_VALUE = re.compile(r"\s*\$?\s*[A-Za-z](?:_\{?\w+\}?)?\s*")
_VARIABLE = re.compile(r"\d\s*\$?[A-Za-z]\$?\s*$")
"""One letter after a number, which may be a variable and not the symbol of a unit."""
_NESTED_FACTORIAL = re.compile(r"!\s*\)*\s*!")
_CPU_TIMEOUT_S = 5.0
"""Max CPU time of one comparison, including regular expressions, parsing and algebra."""
_MAX_PROSE_CHARACTERS = 8000
"""Length of the end of an unmarked response that is searched for its answer."""
_MAX_SEARCHED_CHARACTERS = 1000
"""Length of the end of an unmarked response in which the library searches for an expression."""
_TOO_LARGE = re.compile(
    rf"(?<![\d.,])\d(?:,?\d){{{bounds.MAX_CHARACTERS}}}|(?:\^[\s{{]*|\*\*\s*|\d[eE])[-+]?\d{{7}}"
)
"""Numbers that libraries refuse or compute for hours: of very many digits, or with a very large exponent."""
_LONG_NUMBER = re.compile(
    rf"(\.\d{{100}})\d+|(?<![\d.,])(\d{{100}})(?=(?:,?\d){{{bounds.MAX_CHARACTERS}}})(?:,?\d)+"
)
_RELATION = re.compile(r"=|\\equiv")
_MAX_PARTS = 4
"""Max number of alternative inequalities."""
_LIBRARY_TIMEOUT_S = 3600
"""Max seconds of a library call, far above ours: the library would report a time-out as a wrong answer."""


def math_answer(prompt: str, response: str, answer: Any, row: Mapping[str, Any]) -> float:
    r"""Compares the final answers of a response and a row.

    An answer in GSM8K's form, a derivation that ends in ``#### 72``, counts as the part after the
    mark. The response's final answer is the first that exists of: its last ``\boxed{}``, with
    earlier ones that a comma or ``and`` joins to it; the text after its last mark; the text that it
    announces as its answer; its last expression.

    Args:
        prompt: Question, which decides whether ``72\%`` answers 72, ``1:4`` a quarter, and ``72 more`` 72.

    Raises:
        ValueError: If there is no answer, or it is a list, empty or too long.
        TimeoutError: If the comparison takes too long; the result is then unknown.
    """
    text = answer_text(answer, reward="math_verify")
    with _cpu_time_limit(_CPU_TIMEOUT_S):
        text = spelling.normalized(spelling.short_spaced(text))
        reply = _final_part(text, _tagged(spelling.short_spaced(answer_part(response))))
        reply = question.without_reason(spelling.normalized(reply))
        reply = _with_short_numbers(text, reply)
        amount = _marked(reply) or reply
        final = _marked(reply) or _last_line(reply)
        if quantities.other_currencies(text, amount, prompt) or beside.is_amount_of_money(
            prompt, _marked(text) or text, final
        ):
            return 0.0
        if any(map(quantities.is_in_dollars, (text, amount))) or question.asks_for_dollars(prompt):
            text, reply = quantities.in_dollars(text), quantities.in_dollars(reply)
        if question.asks_for_cents(prompt) and quantities.is_in_dollars(amount):
            reply = quantities.in_cents(reply)
        text, reply = quantities.plain_amounts(text), quantities.plain_amounts(reply)
        marked = _marked(text)
        expected = _single_spaced(text if marked is None else marked)
        if len(expected) > bounds.MAX_CHARACTERS:
            raise ValueError(
                f"math_verify supports answers of up to {bounds.MAX_CHARACTERS} characters, got "
                f"{len(expected)}; mark the final expression with \\boxed{{}} or {_MARK}"
            )
        letters = _COMMAND.sub("", quantities.scaled(expected, has_letters=False))
        has_letters = bool(_LETTER.search(letters))
        unscaled, reply = reply, quantities.scaled(reply, has_letters=has_letters)
        final = _marked(reply) or _last_line(reply)
        if any(
            is_other(prompt, expected, final)
            for is_other in (beside.is_other_quantity, beside.value_of_other_name)
        ):
            return 0.0
        if question.asks_for_scale(prompt):
            reply = quantities.unscaled(unscaled)
        if _marked(reply) is None:
            reply = subjects.without_predicate(
                prompt, expected, question.without_echo(prompt, reply)
            )
        reply = question.without_comparisons(prompt, _without_whole(prompt, expected, reply))
        if question.asks_for_per_cent(prompt) and spelling.is_plain_above_1(expected):
            reply = spelling.without_per_cent(reply)
        if _is_other_value(prompt, expected, _marked(reply) or reply):
            return 0.0
        reply = beside.without_dollar_signs(reply)
        # The question may ask for the number of millions, so the answer may omit the word.
        scaled = quantities.scaled(expected, has_letters=has_letters)
        ratio = question.as_ratio(prompt, expected)
        quantity = asked.as_quantity(prompt, expected)
        readings = dict.fromkeys((scaled, quantities.unscaled(expected), ratio or scaled, quantity))
        return float(any(_is_answered(reading, reply, answer) for reading in readings))


def _final_part(answer: str, response: str) -> str:
    """Returns the marked final answer of a response, or its last lines; nothing if the answer is too long."""
    marked = _marked(response)
    if marked is None:
        lines = response[-_MAX_PROSE_CHARACTERS:].splitlines()
        return "\n".join(_end_of(line, bounds.MAX_CHARACTERS) for line in lines)
    if marked and len(marked) <= max(bounds.MAX_CHARACTERS, 2 * len(answer)):
        return f"{_BOX}{marked}}}" if _BOX in response else f"{_MARK} {marked}"
    return f"{_BOX}}}"


def _end_of(text: str, length: int) -> str:
    """Returns the end of a text, which begins with a word."""
    return text if len(text) <= length else text[-length:].partition(" ")[2]


def _with_short_numbers(answer: str, response: str) -> str:
    """Returns the searched part of a response with the first 100 digits of very long numbers.

    It is empty if the final answer has a number that is too large to compare, and none is expected.
    """
    final = _RELATION.split(_marked(response) or _last_line(response))[-1]
    if _TOO_LARGE.search(final) and not _TOO_LARGE.search(answer):
        return ""
    return response if _LONG_NUMBER.search(answer) else _LONG_NUMBER.sub(r"\1\2", response)


def _without_whole(prompt: str, expected: str, reply: str) -> str:
    is_count = spelling.plain_number(expected) is not None
    return question.without_whole(prompt, reply) if is_count else reply


def _is_other_value(prompt: str, expected: str, reply: str) -> bool:
    """Returns True for ``2x = 3`` unless the question asks for ``2x``, and for its uncomputed ``2 + 1``."""
    if question.is_restated(prompt, expected, reply) and not spelling.same_text(expected, reply):
        return True
    has_unit = units.split(reply.rpartition("=")[2].strip())[1] is not None
    if has_unit or not _NUMBER_OF_NAME.fullmatch(expected):
        return False
    left_side = spelling.other_value(_single_spaced(reply))
    return left_side is not None and not question.asks_for(prompt, left_side)


def _is_answered(expected: str, response: str, answer: Any) -> bool:
    if not spelling.as_text(expected):
        raise ValueError(f"math_verify finds no expression in the answer {str(answer)[-80:]!r}")
    response, expected = spelling.without_emphasis(response), spelling.without_emphasis(expected)
    candidate = _marked(response)
    if candidate is not None:
        candidate = spelling.without_emphasis(_single_spaced(candidate)).removesuffix("\\")
        return _same(expected, candidate)
    lines = [line for text in response.splitlines() if (line := _single_spaced(text))]
    if len(lines) == 1 and not spelling.has_words(
        spelling.without_unit_text(
            line := notation.rewritten(expected, spelling.spelled(_without_period(lines[0])))
        )
    ):
        if _same(expected, line):
            return True
        if (
            spelling.is_bare(line)
            or spelling.has_only_equations(line)
            or len(spelling.numbers_of_chain(line)) > 1
        ):
            return False
    return _is_said(expected, lines)


def _is_said(expected: str, lines: list[str]) -> bool:
    """Returns True if the lines of a response announce an answer, or end with it."""
    response = "\n".join(lines)[-_MAX_PROSE_CHARACTERS:]
    is_line = len(lines) == 1
    announced = _ANNOUNCED.findall(response)
    candidate = announced[-1].strip("* ") if announced else response
    letter, value = spelling.choice(expected)
    chosen, _ = spelling.choice(_SAID_CHOICE.sub("", spelling.without_emphasis(candidate)))
    if letter and not value and chosen and (announced or is_line):
        return chosen == letter and not spelling.is_refusal(candidate)
    if date := dates.date_of(expected):
        line = _last_line(candidate)
        announcement = _SAID.search(line)
        return dates.only_date(announcement[1] if announcement else line) == date
    if spelling.is_clock(expected):
        return spelling.same_text(expected, spelling.only_time(_last_line(candidate)))
    if announced or is_line:
        candidate = spelling.spelled(candidate)
        is_short = bool(announced) and not spelling.has_words(candidate)
        if is_short or units.split(candidate)[1] is not None:
            return _same(expected, candidate)
    return _ends_in(expected, candidate, lines, is_whole=bool(announced) or is_line)


def _ends_in(expected: str, candidate: str, lines: list[str], *, is_whole: bool) -> bool:
    """Returns True if a sentence ends in an answer, and says nothing that changes it.

    Args:
        candidate: Announced answer, or the response.
        lines: Of the response.
        is_whole: True if the candidate is an answer without prose around it.
    """
    last_line = lines[-1] if lines else ""
    if spelling.plain_number(expected) is not None:
        is_last_line = candidate == last_line
        last_line = quantities.with_digits_in_line(last_line)
        candidate = last_line if is_last_line else candidate
    announcement = _SAID.search(candidate)
    ending = announcement[1] if announcement else candidate if is_whole else ""
    if not spelling.is_changed(expected) and (
        spelling.has_changed_number(ending)
        or spelling.has_changed_last_number(last_line)
        or (not spelling.is_relation(expected) and spelling.is_bound(ending))
        or question.is_comparison(ending)
        or spelling.is_refusal(last_line)
        or (not spelling.is_list(expected) and spelling.is_enumeration(last_line))
    ):
        return False
    if spelling.same_text(expected, candidate) or (
        announcement
        and any(
            spelling.same_text(expected, text)
            for text in (announcement[1], _PREPOSITION.sub("", announcement[1]))
        )
    ):
        return True
    short = spelling.spelled(announcement[1]) if announcement else ""
    if spelling.plain_number(expected) is not None and not re.search(r"\d", short):
        short = ""
    if not short or (spelling.has_words(short) and units.split(short)[1] is None):
        quantity = _LAST_QUANTITY.search(last_line)
        short = quantity[1] if quantity else ""
        short = "" if None in (units.split(expected)[1], units.split(short)[1]) else short
    if short:
        return _same(expected, short)
    formula = spelling.last_formula(last_line)
    if formula and spelling.plain_number(expected) is None and _same(expected, formula):
        return True
    gold = () if spelling.is_text(expected) else _read(expected)
    if "%" not in expected:
        candidate = spelling.per_cent_as_share(candidate)
    candidate = spelling.with_improper_fractions(candidate.replace("\\$", ""))
    candidate = _end_of(candidate, _MAX_SEARCHED_CHARACTERS)
    if not bounds.is_flat(candidate, expected):
        return False
    return any(_verify(gold, _parse(candidate, targets)) for targets in (_SEARCH, _SEARCH_UNITS))


@contextmanager
def _cpu_time_limit(seconds: float) -> Iterator[None]:
    """Interrupts the body, including regular expressions. Works only in a process's main thread.

    Raises:
        TimeoutError: If the body takes more CPU time.
    """

    def expire(*_: object) -> None:
        raise _CpuTimeExpired

    previous = signal.signal(signal.SIGVTALRM, expire)
    # Repeat: the interpreter ignores exceptions raised inside a destructor or a callback.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)
    try:
        yield
    except _CpuTimeExpired as error:
        raise TimeoutError(f"math_verify was stopped after {seconds:g} s of CPU time") from error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


class _CpuTimeExpired(BaseException):
    """CPU time expired. Not an ``Exception``, because the library and sympy catch those."""


def _single_spaced(text: str) -> str:
    """Replaces each run of white space by one space."""
    return " ".join(text.split())


def _without_period(line: str) -> str:
    """Removes the period that ends a sentence; three go on with a number."""
    return line if line.endswith("..") else line.removesuffix(".")


def _last_line(response: str) -> str:
    lines = response.strip().splitlines()
    return lines[-1] if lines else ""


def _tagged(response: str) -> str:
    """Returns the part in the last ``<answer>`` tags of a response; all of it if there are none."""
    start, tagged = None, response
    for tag in _TAG.finditer(response):
        if not tag[1]:
            start = tag.end() if start is None else start
        elif start is not None:
            start, tagged = None, response[start : tag.start()]
    return tagged


def _marked(text: str) -> str | None:
    text = _BARE_BOX.sub(r"\\boxed{\1}", text.replace("\\fbox{", _BOX))
    start = text.rfind(_BOX)
    if start < 0:
        return _after_mark(text.rpartition(_MARK)[2].strip()) if _MARK in text else None
    boxes = [_braced(text[start + len(_BOX) :])]
    while (before := text.rfind(_BOX, 0, start)) >= 0:
        box = _braced(text[before + len(_BOX) : start])
        end = before + len(_BOX) + len(box) + 1
        if end > start or not _BETWEEN_BOXES.fullmatch(text, end, start):
            break
        boxes.insert(0, box)
        start = before
    return ", ".join(dict.fromkeys(boxes))


def _after_mark(text: str) -> str:
    """Returns the first line if others, such as a farewell, have no digit and no formula."""
    first, _, others = text.partition("\n")
    return text if re.search(r"[\d\\$]", others) else first.strip()


def _braced(text: str) -> str:
    """Returns the text up to the unmatched closing brace."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:index]
    return text


def _same(expected: str, candidate: str) -> bool:
    if len(candidate) > bounds.MAX_CHARACTERS:
        return False
    if spelling.same_text(expected, candidate):
        return True
    expected, candidate = spelling.spelled(expected), spelling.spelled(candidate.strip(" ,;"))
    candidate = bounds.last_value(notation.rewritten(expected, candidate), expected)
    candidate = bounds.with_combinations(candidate)
    expected = bounds.with_combinations(expected)
    if not bounds.is_readable(candidate, expected):
        return False
    function = notation.renamed(expected, candidate)
    if function is None:
        return False
    candidate = function
    expected, candidate = spelling.same_function(expected, spelling.turned(candidate))
    if _is_changed(expected, candidate):
        return False
    if "%" in candidate and "%" not in expected:
        candidate = spelling.per_cent_as_share(candidate)
    name, _, value = candidate.partition("=")
    if _NAME_OF_VALUE.fullmatch(name) and units.split(value)[1] is not None:
        candidate = value.strip()
    same = _same_quantity(expected, candidate)
    return _same_expression(expected, candidate) if same is None else same


def _is_changed(expected: str, candidate: str) -> bool:
    """Returns True if only the candidate says more than its number, such as ``72 or more``."""
    if "%" in candidate and quantities.is_in_dollars(expected):
        return True
    return any(
        says_more(candidate) and not says_more(expected)
        for says_more in (spelling.is_changed, spelling.is_bound, question.is_comparison)
    )


def _same_expression(expected: str, candidate: str) -> bool:
    (expected_choice, value), (candidate_choice, candidate_value) = (
        spelling.choice(expected),
        spelling.choice(candidate),
    )
    if (
        expected_choice
        and candidate_choice
        and (value or candidate_value or expected_choice == candidate_choice)
    ):
        return expected_choice == candidate_choice
    if expected_choice and not value:
        return False
    expected, candidate = value or expected, candidate_value or candidate
    bare = spelling.without_condition(expected), spelling.without_condition(candidate)
    if (bare[0] == expected) != (bare[1] == candidate) or spelling.same_text(
        expected[len(bare[0]) :], candidate[len(bare[1]) :]
    ):
        expected, candidate = bare
    if any(
        differ(expected, candidate)
        for differ in (spelling.has_other_form, spelling.has_other_alternatives)
    ):
        return False
    ratios = spelling.ratio_as_fraction(expected), spelling.ratio_as_fraction(candidate)
    if ratios[0] is not None and ratios[1] is None and not spelling.is_clock(expected):
        expected = ratios[0]
    return spelling.same_text(expected, candidate) or (
        not spelling.is_text(expected) and _same_number(expected, candidate)
    )


def _same_quantity(expected: str, candidate: str) -> bool | None:
    """Compares two numbers with units; returns None if not both have a unit, or one that is understood.

    A chain such as ``5000 m = 5 km`` has to be true.
    """
    first, sign, others = candidate.partition("=")
    if sign and None not in (units.split(first)[1], units.split(others.partition("=")[0])[1]):
        is_true = _same_quantity(first, others.partition("=")[0])
        return bool(is_true) and bool(_same_quantity(expected, others))
    (expected_number, expected_unit), (number, unit) = units.split(expected), units.split(candidate)
    has_unit = expected_unit is not None and not _VARIABLE.search(expected)
    if has_unit and unit is None and spelling.plain_number(candidate) is not None:
        return spelling.plain_number(expected_number) == spelling.plain_number(candidate)
    if expected_unit is None or unit is None:
        return None
    if units.are_angles(expected_unit, unit):
        angles = [
            spelling.in_radians(f"{value}^\\circ") if angle.is_degree else value
            for value, angle in ((expected_number, expected_unit), (number, unit))
        ]
        return _verify(_read(angles[0]), _read(angles[1]))
    if expected_unit.dimension != unit.dimension:
        return False
    ratio = unit.size / expected_unit.size
    if ratio != 1:
        number = f"\\frac{{{ratio.numerator}}}{{{ratio.denominator}}}\\cdot\\left({number}\\right)"
    return _same_number(expected_number, number)


def _same_number(expected: str, candidate: str) -> bool:
    """Compares values; a chain such as ``1 + 1 = 2`` must be true, and one part of it the answer."""
    parts = spelling.numbers_of_chain(candidate)
    if len(parts) == 1 or len(spelling.numbers_of_chain(expected)) > 1:
        return _same_value(expected, candidate)
    return _is_chain(parts) and any(_same_value(expected, number) for _, number in parts)


def _is_chain(parts: list[tuple[str, str]]) -> bool:
    """Returns True if each number of a chain such as ``1 + 1 = 2`` equals the next one, or is about it."""
    values = [next(iter(_read(number)), None) for _, number in parts]
    return all(
        value is not None
        and next_value is not None
        and (same_numbers(value, next_value) or (bool(sign) and is_rounded(value, number)))
        for (value, next_value), (sign, number) in zip(pairwise(values), parts[1:], strict=True)
    )


def _same_value(expected: str, candidate: str) -> bool:
    plain = spelling.plain_number(expected), spelling.plain_number(candidate)
    is_scaled = spelling.has_magnitude(expected) or spelling.has_magnitude(candidate)
    if None not in plain and not is_scaled:
        return plain[0] == plain[1]
    items = _plain_items(expected), _plain_items(candidate)
    if all(items) and any(len(side) > len({*side}) for side in items):
        return sorted(items[0]) == sorted(items[1])
    if _NESTED_FACTORIAL.search(candidate):
        return False
    bases = {base for text in (expected, candidate) if (base := spelling.base(text))}
    if len(bases) > 1 or (bases and bases != {"10"} and not spelling.base(expected)):
        return False
    if spelling.has_magnitude(expected) and spelling.has_magnitude(candidate):
        expected, candidate = spelling.with_magnitude(expected), spelling.with_magnitude(candidate)
    # The answer to "which per cent?" may be 25 where 25 % is expected.
    ways: list[Callable[[str], str]] = [
        str,
        spelling.without_per_cent,
        spelling.with_magnitude,
        spelling.in_radians,
    ]
    if "%" not in expected:
        ways.remove(spelling.without_per_cent)
    pairs = [(way(expected), way(candidate)) for way in ways]
    return any(_verify(_read(gold), _read(answer)) for gold, answer in dict.fromkeys(pairs))


def _plain_items(text: str) -> list[Fraction]:
    """Returns the numbers of a list such as ``1, 1, 2``; nothing for other texts and for ``1,000,000``."""
    text = spelling.as_latex(text).strip()
    if _GROUPED.fullmatch(text):
        return []
    items = [spelling.plain_number(item) for item in text.split(",")]
    return [] if None in items else [item for item in items if item is not None]


def _is_share(value: Any) -> bool:
    """Returns True for a number between -1 and 1, to which a per cent sign makes a difference."""
    return isinstance(value, Expr) and value.is_number and bool(abs(value) < 1)


def _read(answer: str) -> tuple[Any, ...]:
    for parts, combined in (
        (spelling.alternatives(answer), Union),
        (spelling.conjuncts(answer), Intersection),
    ):
        if 1 < len(parts) <= _MAX_PARTS and (solutions := _combined(parts, combined)):
            return tuple(solutions)
    latex = spelling.as_latex(spelling.rows_as_list(answer))
    for spelled in (latex, *spelling.rewritten(latex)):
        if readings := _parse(f"{_BOX}{spelled}}}", _READ, fallback_mode="no_fallback"):
            return tuple(readings)
    return ()


def _parse(text: str, targets: list[Any], **options: Any) -> list[Any]:
    return list(math_verify.parse(text, targets, parsing_timeout=_LIBRARY_TIMEOUT_S, **options))


def _combined(parts: list[str], combined: Callable[..., Any]) -> list[Any]:
    """Returns the solutions of several inequalities; empty if any part is no inequality.

    Args:
        combined: Union or intersection.
    """
    relations = [relation for text in parts for relation in _read(text)]
    return [] if len(relations) < len(parts) else _solutions(*relations, combined=combined)


def _is_inequality(value: Any) -> bool:
    return bool(is_relation(value) and not is_equation(value))


def _depth(value: Any) -> int:
    """Returns the number of sets in each other."""
    inner = value.args if isinstance(value, FiniteSet) else ()
    return (
        1 + max(map(_depth, inner), default=0)
        if any(isinstance(v, FiniteSet) for v in inner)
        else 0
    )


def _solutions(*relations: Any, combined: Callable[..., Any] = Union) -> list[Any]:
    if not all(map(_is_inequality, relations)) or any(map(probes.is_of_high_degree, relations)):
        return []
    try:
        return [combined(*(relation.as_set() for relation in relations))]
    except (NotImplementedError, ValueError, TypeError):  # not of one variable
        return []


def _is_equal(gold: Any, answer: Any, **options: Any) -> bool:
    with relative_comparison():
        return bool(math_verify.verify(gold, answer, timeout_seconds=_LIBRARY_TIMEOUT_S, **options))


def _verify(gold: Iterable[Any], answer: Iterable[Any]) -> bool:
    return any(
        _equal(gold_reading, answer_reading) for gold_reading in gold for answer_reading in answer
    )


def _equal(gold: Any, answer: Any) -> bool:
    if isinstance(gold, Tuple | Interval) or isinstance(answer, Tuple | Interval):
        gold, answer = _vector(gold), _vector(answer)
    if not bounds.is_computable(answer) and is_equation(answer) and not is_relation(gold):
        answer = take_last_relation(answer).rhs
    if not (bounds.is_computable(gold) and bounds.is_computable(answer)):
        return bool(gold == answer) or residues.same(gold, answer)
    return not probes.differ(gold, answer) and _is_equivalent(gold, answer)


def _is_equivalent(gold: Any, answer: Any) -> bool:
    """Returns True if algebra confirms that two values are equal."""
    if _differ_in_kind(gold, answer):
        return False
    if _names(gold) != _names(answer):
        gold, answer = _numbered(gold), _numbered(answer)
    if _is_equal(gold, answer, allow_set_relation_comp=True):
        return True
    solutions = _solutions(gold), _solutions(answer)
    if all(solutions):
        return bool(solutions[0] == solutions[1])
    if (
        not (isinstance(gold, Expr) and isinstance(answer, Expr))
        or gold.has(Abs)
        or answer.has(Abs)
    ):
        return False
    general = gold.free_symbols | answer.free_symbols
    if not general:
        return False
    values = {symbol: _particular(symbol) for symbol in general}
    return _is_equal(gold.xreplace(values), answer.xreplace(values))


def _differ_in_kind(gold: Any, answer: Any) -> bool:
    """Returns True for kinds that the library compares as if they were one."""
    if isinstance(gold, Eq) and isinstance(gold.lhs, Add) and isinstance(answer, Expr):
        return True  # an equation, not the value of its right side
    # The library takes two numbers for the ends of an interval.
    kinds = [value if isinstance(value, FiniteSet) else None for value in (gold, answer)]
    if any(
        value is not None and value.args and all(map(is_assignment_relation, value.args))
        for value in kinds
    ) and any(isinstance(value, Interval) for value in (gold, answer)):
        return True
    if any(map(_is_inequality, (gold, answer))) and any(
        isinstance(value, Expr) for value in (gold, answer)
    ):
        return True
    has_inequality = any(map(_is_inequality, (gold, answer)))
    if has_inequality and any(isinstance(value, FiniteSet) for value in (gold, answer)):
        return True
    return _depth(gold) != _depth(answer)


def _names(value: Any) -> set[str]:
    """Returns the names to which ``x_1 = 1, x_2 = 2`` assigns; none of other values."""
    items = value.args if isinstance(value, FiniteSet) and len(value.args) > 1 else ()
    has_names = bool(items) and all(map(is_assignment_relation, items))
    return {str(item.lhs) for item in items} if has_names else set()


def _numbered(value: Any) -> Any:
    """Returns the values of ``x_1 = 1, x_2 = 2``, which are several values of one variable; others as is.

    If both answers assign to the same names, each of these may be an unknown.
    """
    names = _names(value)
    is_numbered = len({name.partition("_")[0] for name in names}) == 1
    if not is_numbered or len(names) != len(value.args):
        return value
    return FiniteSet(*map(unwrap_eq, value.args))


def _vector(value: Any) -> Any:
    """Converts a vector, or assignments to several names in their order, to a tuple; returns others as is."""
    if isinstance(value, MatrixBase) and 1 in value.shape:
        return Tuple(*value)
    if isinstance(value, FiniteSet) and all(
        is_assignment_relation(assignment) for assignment in value
    ):
        assignments = sorted(value._unsorted_args, key=lambda assignment: str(assignment.lhs))  # noqa: SLF001
        if len({str(assignment.lhs) for assignment in assignments}) < len(assignments):
            return value  # several values of one variable
        return Tuple(*map(unwrap_eq, assignments))
    return value


def _particular(symbol: Any) -> Any:
    r"""Returns the replacement of a symbol: the imaginary unit for ``i``, otherwise a positive symbol.

    Roots of a positive symbol, such as ``\sqrt[3]{x^2}``, are powers.
    """
    return I if symbol.name == "i" else Symbol(symbol.name, positive=True)
