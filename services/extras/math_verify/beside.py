r"""Compares the unit or the words next to the number of a final answer with the question. Pure.

A number answers a question alone, or beside what agrees with the expected answer or with what the question
asks for (:mod:`asked`). Three things may stand beside a number, and each has one rule:

* a currency: the question has to ask for money, unless it does not show what it asks for;
* a unit: the asked one, or one of the asked dimension, or one that the question has;
* a noun: the asked one, or one that the question does not have, which may be another word for it. A noun that
  the question has elsewhere counts something else, and so does ``pairs`` or ``boxes``.

Words that change the number itself (``each``, ``more than``, ``ago``, ``th``) have to be in the question.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from services.extras.math_verify import asked, question, subjects, units
from services.extras.math_verify.asked import Asked
from services.extras.math_verify.quantities import CODES, SIGNS
from services.extras.math_verify.words import without_fonts

_FRACTION: Final = r"\\[dt]?frac\s*\{?\s*(\d+)\s*\}?\s*\{?\s*(\d+)\s*\}?"
_NUMBER: Final = re.compile(
    rf"(?<![\w.,/:^}}])-?(?:(?:\d+\s*)?{_FRACTION}|\d+\s+\d+\s*/\s*\d+"
    r"|(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+|\s*\\(?:times|cdot)\s*10\s*\^\s*\{?-?\d+\}?)?)"
    r"(?![\d/:]|\.\d|,\d)"
)
_POWER: Final = re.compile(r"\s*\\(?:times|cdot)\s*10\s*\^\s*\{?(-?\d+)\}?")
_LAYOUT: Final = re.compile(r"\\[,;:! ]|\\?\$|\\[()\[\]]|[*~`]|\\q?quad\b")
_FORMULA: Final = re.compile(r"(?<![\\$])\$(?!\$)((?:[^$\n]|\\\$)+?)(?<![\s\\])\$(?!\d)")
"""Text between two dollar signs, of which the second one begins no amount."""
_DOLLAR: Final = re.compile(r"(?<!\$)\\?\$(?!\$)\s*(?=-?[\d.])")
_CURRENCY: Final = re.compile(rf"(?:\\?\$|[{SIGNS}])\s*(?=-?[\d.])")
_CURRENCY_AFTER: Final = re.compile(
    rf"\s*(?:\\?\$|[{SIGNS}¢]|(?i:(?:US\s+)?(?:dollars?|bucks?|cents?|euros?|pesos?|rupees?|yen|yuan))\b"
    rf"|(?:{CODES})(?![A-Za-z]))"
)
_MONEY: Final = "\N{CURRENCY SIGN}"
_DEGREE: Final = re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?|\s*\\degree(?![A-Za-z])")
_END: Final = re.compile(r"[;:!?(]|[.,](?:\s|$)|\n|\s-\s|[<>=+]")
_LEADING_ZERO: Final = re.compile(r"-?0\d")
_ORDINAL: Final = re.compile(r"\s*\^?\s*\{?\s*(?:st|nd|rd|th)\b")
_RATE: Final = (
    r"each|every|apiece|a\s+piece|per(?!\s*(?:cent|mille))|an?\s+(?:second|minute|hour|day|week|month|year|time|person|night)"
    r"|hourly|daily|weekly|monthly|yearly|annually"
)
_RATE_OF: Final = re.compile(
    r"(?i)\b(?:each|every|per(?!\s*(?:cent|mille))|a|an)\s+([A-Za-z]{3,})|\b(hour|dai|week|month|year|annual)ly\b"
)
"""Rate with the thing to which it refers."""
_NO_NOUN: Final = frozenset({"half", "total", "time", "result", "piece", "lot"})
_ASKS_FOR_RATE: Final = re.compile(
    rf"(?i)\b(?:{_RATE}|rates?|average|mean|speed|fast|slow|one|single|individual|share|equal\w*|split|unit|both)\b"
)
_RELATIVE: Final = (
    r"ago|later|earlier|hence|from\s+now|from\s+today|older|younger|taller|shorter|longer|heavier|lighter"
    r"|wider|deeper|bigger|larger|smaller|faster|slower|cheaper|farther|further|overdue|late|early"
)
_KINDS: Final[Mapping[str, re.Pattern[str]]] = {
    "rate": re.compile(rf"(?i)\b(?:{_RATE})\b"),
    "relative": re.compile(rf"(?i)\b({_RELATIVE})\b"),
}
_NAMED: Final = re.compile(
    rf"(?:^|[.,:;]|(?<![\\A-Za-z])[A-Za-z]{{2,}}(?=\s))[\s(]*({asked.NAME.pattern})\s*=(?!=)"
)
_BOUND: Final = re.compile(
    r"(?i)\b(?:(?:more|less|fewer|greater|larger|smaller)\s+than|at\s+(?:least|most)|under|over|up\s+to|nearly|almost)"
    rf"\s*{_MONEY}?$"
)
_ASKS_FOR_BOUND: Final = re.compile(
    r"(?i)\b(?:least|most|min\w*|max\w*|fewest|bounds?|than|under|over|up\s+to)\b"
)
_COUNTED: Final = re.compile(
    r"(?i)^\W*(?:(?!from|for|in|on|at|by|with|to|per|after|because|when|if|of|and|or|more|total|each|every|is|was|as)"
    r"[a-z]{3,}\s+)?(?!dollars?|bucks?|cents?|USD|units?|its|this|his|as|is|was|has|plus|less|across|always|days?)"
    r"(?:people|men|women|children|[a-z]{2,}(?<![siu])s)\b"
)
"""A plural of things, where a question asks for a unit or for money."""
_PART: Final = re.compile(r"(?i)\s*(?:half|quarter|double|triple)[\s-]+[a-z]")
_PART_WORD: Final = re.compile(r"(?i)\b(?:half|halves|quarters?|doubles?|triples?)\b")
_SCIENTIFIC: Final = re.compile(r"(\d)[eE]([+-]?\d+)(?![\w.])")
_UNTIL: Final = re.compile(r"(?i)\b(?:in|within|every|after)\s*$")
_ASKS_WHEN: Final = re.compile(r"(?i)\b(?:when|how\s+(?:long|many|soon|much)|what\s+year)\b")
_ASKS_FOR_ORDINAL: Final = re.compile(
    r"(?i)\b(?:which|place|position|rank\w*|ordinal|what\s+(?:day|date|floor|term|grade|century|percentile))\b"
)
_ASKS_FOR_DIFFERENCE: Final = re.compile(r"(?i)\b(?:differ\w*|compare\w*|than)\b")
_IN_PHRASE: Final = re.compile(
    r"(?<=\S)(?<!\bsq)(?<!\bsq\.)(?<!\bcu)(?<!\bcu\.)(?<!square)(?<!cubic)\s+(?=in\b)"
)
"""Before ``in total``, where ``in`` is no inch."""
_MIN_WORDS: Final = 3
"""Words of a question that may name a unit; a shorter one says nothing about it."""
_MAX_UNIT_WORDS: Final = 5
_MAX_NUMBER_CHARACTERS: Final = 2000
_MAX_EXPONENT: Final = 2000
_MAX_REST: Final = 60
"""Characters after a number in which a word may belong to it."""


@dataclass(frozen=True, slots=True)
class _Number:
    """Number of a final answer that equals the expected one, with its neighbours."""

    before: str
    digits: str
    rest: str
    expected_digits: str
    expected_rest: str


def is_amount_of_money(prompt: str, expected: str, final: str) -> bool:
    r"""Returns True for ``\$36`` and ``36 dollars`` in place of 36 pages, 36 % or 36 km.

    Args:
        expected: Expected answer, with its currency.
        final: Final answer of the response, or its last sentence, with its currency.
    """
    number = _number(expected, final)
    if number is None or not _has_question(prompt) or _CURRENCY_AFTER.match(number.expected_rest):
        return False
    is_money = number.before.endswith(_MONEY) or bool(_CURRENCY_AFTER.match(number.rest))
    asked_thing = asked.asked_by(prompt)
    if not is_money or asked_thing.is_money or question.asks_for_amount(prompt):
        return False
    is_known = asked_thing.is_count or asked_thing.is_quantity or question.counts_things(prompt)
    return is_known or not question.has_money(prompt)


def is_other_quantity(prompt: str, expected: str, final: str) -> bool:
    """Returns True if the number of a final answer that equals the expected one is of another quantity.

    Args:
        expected: Expected answer; one that has no number at its start allows everything.
        final: Final answer of the response, or its last sentence.
    """
    number = _number(expected, final)
    return number is not None and (
        (bool(_LEADING_ZERO.match(number.digits)) and number.digits != number.expected_digits)
        or _is_other(number, prompt)
    )


def _number(expected: str, final: str) -> _Number | None:
    """Returns the last number with the value of the expected one; None if there is none to compare."""
    expected_text, text = _plain(expected), _plain(final)
    expected_number = _NUMBER.search(expected_text)
    if expected_number is None or expected_text[: expected_number.start()].strip():
        return None
    value = _value(expected_number[0])
    if value is None:
        return None
    numbers = [number for number in _NUMBER.finditer(text) if _value(number[0]) == value]
    if not numbers:
        return None
    number = numbers[-1]
    return _Number(
        before=text[: number.start()].rstrip(),
        digits=number[0],
        rest=text[number.end() : number.end() + _MAX_REST],
        expected_digits=expected_number[0],
        expected_rest=expected_text[expected_number.end() :],
    )


def without_dollar_signs(text: str) -> str:
    """Removes dollar signs before numbers that delimit no formula: those of ``$180*7=$1260``."""
    pieces, end = [], 0
    for formula in _FORMULA.finditer(text):
        pieces += [_DOLLAR.sub("", text[end : formula.start()]), formula[0]]
        end = formula.end()
    return "".join([*pieces, _DOLLAR.sub("", text[end:])])


def value_of_other_name(prompt: str, expected: str, final: str) -> bool:
    """Returns True if a final answer has the value of a variable that is not asked for."""
    if re.search(r"[=,<>]", expected) or not _has_question(prompt):
        return False
    names = _NAMED.findall(_plain(final))
    return bool(names) and asked.is_other_name(prompt, names[-1])


def _is_other(number: _Number, prompt: str) -> bool:
    sentence = question.asked(prompt)
    if _ORDINAL.match(number.rest):
        return not (_ORDINAL.match(number.expected_rest) or _ASKS_FOR_ORDINAL.search(sentence))
    rest = _END.split(number.rest, maxsplit=1)[0]
    is_bound = _BOUND.search(number.before) and not _ASKS_FOR_BOUND.search(sentence)
    is_of_other_name = subjects.is_of_other_name(prompt, number.before, number.rest)
    if is_bound or is_of_other_name or _is_of_another_part(rest, number.expected_rest, prompt):
        return True
    asked_thing = asked.asked_by(prompt)
    unit, words = _unit(rest)
    if unit is not None and asked_thing.is_count and _unit(number.expected_rest)[0] is None:
        if asked_thing.nouns.isdisjoint(map(asked.stem, asked.noun_words(rest))):
            return True
        unit, words = None, rest  # "feet" of animals, "bars" of chocolate
    if unit is not None and not _is_allowed(unit, prompt, number.expected_rest):
        simple, rate, period = rest.partition(
            " per "
        )  # meters per week, where the question names the week
        unit, words = _unit(simple)[0], f"{rate}{period}"
        if not rate or unit is None or not _is_allowed(unit, prompt, number.expected_rest):
            return True
    is_time = unit is not None and {name for name, _ in unit.dimension} <= {"time", "months"}
    is_until = is_time and _UNTIL.search(number.before) and not _asks_when(sentence)
    if is_until or _has_other_word(words, sentence, number.expected_rest):
        return True
    return unit is None and _is_other_noun(words, asked_thing, prompt, number)


def _is_of_another_part(rest: str, expected_rest: str, prompt: str) -> bool:
    """Returns True for ``24 red balls`` and ``3 half bolts`` where balls and whole bolts are asked for."""
    if not _has_question(prompt):
        return False
    is_part = _PART.match(rest) and not _PART_WORD.search(
        f"{question.asked(prompt)} {expected_rest}"
    )
    return bool(is_part) or asked.counts_another_part(prompt, rest, expected_rest)


def _is_other_noun(words: str, asked_thing: Asked, prompt: str, number: _Number) -> bool:
    """Returns True if what follows a number counts something else than what is asked for."""
    nouns = [*map(asked.stem, asked.noun_words(words))]
    expected_nouns = {*map(asked.stem, asked.noun_words(number.expected_rest))}
    allowed = asked_thing.nouns | expected_nouns
    plurals = {asked.stem(word) for word in asked.noun_words(words) if asked.is_plural(word)}
    if not allowed.isdisjoint(nouns):
        return False
    if not {*nouns[:2]}.isdisjoint(asked.GROUPS) and _has_question(prompt):
        sentence = f"{question.asked(prompt)} {number.expected_rest}"
        groups = {*nouns[:2]} & asked.GROUPS
        return bool(allowed) or groups.isdisjoint(asked.stems_of(sentence))
    if asked_thing.is_quantity:
        names_unit = asked_thing.unit or asked_thing.is_money or asked_thing.is_per_cent
        is_counted = bool(_COUNTED.match(words)) and not (
            number.expected_rest.strip() or _CURRENCY_AFTER.match(words)
        )
        return is_counted and (
            bool(names_unit) or question.has_unit_of(prompt, asked_thing.dimensions)
        )
    if not asked.GENERAL.isdisjoint(nouns):
        return False
    counted = plurals or ({*nouns[-1:]} if _value(number.digits) == 1 else set())
    return bool(allowed) and not counted.isdisjoint(asked.stems_of(prompt))


def _asks_when(question_text: str) -> bool:
    return not question_text or (
        bool(_ASKS_WHEN.search(question_text)) and not re.search(r"\bago\b", question_text)
    )


def _has_question(prompt: str) -> bool:
    return len(prompt.split()) >= _MIN_WORDS


def _plain(text: str) -> str:
    """Returns a text without fonts, layout and delimiters of formulas."""
    previous = None
    while previous != text:
        previous, text = text, without_fonts(_FORMULA.sub(r" \1 ", text), " ", " ")
    text = _SCIENTIFIC.sub(r"\1\\times 10^{\2}", text)
    text = re.sub(r"\s+\^", "^", _CURRENCY.sub(_MONEY, text))
    return _LAYOUT.sub(" ", _DEGREE.sub("°", text).replace("{,}", ","))


def _value(number: str) -> Fraction | None:
    """Returns the value of a decimal, fraction, mixed number or decimal with a power of ten.

    A number that is too large to compute has none.
    """
    power = _POWER.search(number)
    if len(number) > _MAX_NUMBER_CHARACTERS or (power and abs(int(power[1])) > _MAX_EXPONENT):
        return None
    sign = -1 if number.startswith("-") else 1
    text = number[: power.start()] if power else number
    values = [
        Fraction(digits) for digits in re.findall(r"\d+(?:\.\d+)?|\.\d+", text.replace(",", ""))
    ]
    if len(values) > 1 and not values[-1]:
        return None
    whole = values[0] if len(values) != 2 else Fraction(0)
    fraction = values[-2] / values[-1] if len(values) > 1 else Fraction(0)
    return sign * (whole + fraction) * (Fraction(10) ** int(power[1]) if power else 1)


def _unit(rest: str) -> tuple[units.Unit | None, str]:
    """Returns the longest unit that a text begins with, and the text after it."""
    words = re.findall(r"\S+", _IN_PHRASE.split(rest, maxsplit=1)[0])
    is_preposition = words[:1] == ["in"] and len(words) > 1
    if is_preposition or words[:1] == ["per"] or (words and re.match(r"[^\s\w°'\"/]", words[0])):
        return None, rest
    for end in range(min(len(words), _MAX_UNIT_WORDS), 0, -1):
        unit = units.unit_of(" ".join(words[:end]))
        if unit is not None:
            return unit, " ".join(rest.split(maxsplit=end)[end:])
    return None, rest


def _is_allowed(unit: units.Unit, prompt: str, expected_rest: str) -> bool:
    """Returns True if the question asks for a unit, or else has it.

    The unit of an expected answer is compared elsewhere.
    """
    if not _has_question(prompt) or _unit(expected_rest)[0] is not None:
        return True
    asked_unit = question.asked_unit(prompt)
    if asked_unit is None and question.asks_for_money(prompt):
        return False
    if asked_unit is not None:
        if unit == question.asked_unit_of_rate(prompt):
            return True
        is_of_temperature = asked_unit.dimension[0][0] in ("celsius", "fahrenheit")
        return asked_unit == unit or (unit.is_degree and is_of_temperature)
    dimensions = asked.asked_by(prompt).dimensions
    if question.mentions(prompt, unit):
        return not dimensions or unit.dimension in dimensions
    is_unnamed = not question.has_unit_of(prompt, {unit.dimension}) and not question.asks_for_age(
        prompt
    )
    return unit.dimension in dimensions and is_unnamed


def _has_other_word(words: str, question_text: str, expected_rest: str) -> bool:
    allowed = f"{question_text} {expected_rest}".casefold()
    if _KINDS["rate"].search(words) and not _ASKS_FOR_RATE.search(allowed):
        return True
    if (rate := _RATE_OF.search(words)) and _KINDS["rate"].search(words):
        noun = (rate[1] or rate[2]).casefold()
        stem = {"dai": "da", "annual": "year"}.get(noun, noun[: max(3, len(noun) - 2)])
        if noun not in _NO_NOUN and stem not in allowed:
            return True
    relative = _KINDS["relative"].search(words)
    return (
        relative is not None
        and relative[1].casefold() not in allowed
        and not _ASKS_FOR_DIFFERENCE.search(allowed)
    )
