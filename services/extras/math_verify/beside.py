r"""What a final answer says beside its number: a unit, a word, an ordinal's letters. Pure.

A number answers a question alone, or with a unit or a word that the question or the expected answer allows;
any other one makes it another quantity: ``12 pairs``, ``12 per day`` and ``12 m`` do not answer "How many
kilometres?" with 12. A noun that only names what is counted is allowed, because questions name it otherwise.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Final

from services.extras.math_verify import question, units

_FRACTION: Final = r"\\[dt]?frac\s*\{?\s*(\d+)\s*\}?\s*\{?\s*(\d+)\s*\}?"
_NUMBER: Final = re.compile(
    rf"(?<![\w.,/:^}}])-?(?:(?:\d+\s*)?{_FRACTION}|\d+\s+\d+\s*/\s*\d+"
    r"|(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+|\s*\\(?:times|cdot)\s*10\s*\^\s*\{?-?\d+\}?)?)"
    r"(?![\d/:]|\.\d|,\d)"
)
_POWER: Final = re.compile(r"\s*\\(?:times|cdot)\s*10\s*\^\s*\{?(-?\d+)\}?")
_FONT: Final = re.compile(r"\\(?:text\w*|mathrm|mbox|operatorname|mathbf)\s*\{([^{}]*)\}")
_LAYOUT: Final = re.compile(r"\\[,;:! ]|\\?\$|\\[()\[\]]|[*~`]|\\q?quad\b")
_DEGREE: Final = re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?|\s*\\degree(?![A-Za-z])")
_END: Final = re.compile(r"[;:!?(]|[.,](?:\s|$)|\n|\s-\s|[<>=+]")
_LEADING_ZERO: Final = re.compile(r"-?0\d")
_ORDINAL: Final = re.compile(r"\s*\^?\s*\{?\s*(?:st|nd|rd|th)\b")
_RATE: Final = (
    r"each|every|apiece|a\s+piece|per(?!\s*(?:cent|mille))|an?\s+(?:second|minute|hour|day|week|month|year|time|person|night)"
    r"|hourly|daily|weekly|monthly|yearly|annually"
)
_RATE_OF: Final = re.compile(
    r"\b(?:each|every|per(?!\s*(?:cent|mille))|a|an)\s+([A-Za-z]{3,})|\b(hour|dai|week|month|year|annual)ly\b",
    re.IGNORECASE,
)
"""Rate with the thing to which it refers."""
_NO_NOUN: Final = frozenset({"half", "total", "time", "result", "piece", "lot"})
_ASKS_FOR_RATE: Final = re.compile(
    rf"\b(?:{_RATE}|rates?|average|mean|speed|fast|slow|one|single|individual|share|equal\w*|split|unit|both)\b",
    re.IGNORECASE,
)
_GROUPS: Final = (
    r"pair|couple|set|box|pack|packet|package|bag|group|team|case|crate|roll|bundle|dozen|gross|score|row|stack"
    r"|dime|nickel|penny|pennie|quarter|coin|bill|time|fold|hundred"
)
_RELATIVE: Final = (
    r"ago|later|earlier|hence|from\s+now|from\s+today|older|younger|taller|shorter|longer|heavier|lighter"
    r"|wider|deeper|bigger|larger|smaller|faster|slower|cheaper|farther|further|overdue|late|early"
)
_KINDS: Final[Mapping[str, re.Pattern[str]]] = {
    "rate": re.compile(rf"\b(?:{_RATE})\b", re.IGNORECASE),
    "group": re.compile(rf"^\W*(?:\w+\s+)?({_GROUPS})(?:e?s)?\b", re.IGNORECASE),
    "relative": re.compile(rf"\b({_RELATIVE})\b", re.IGNORECASE),
}
_COUNTED: Final = re.compile(
    r"^\W*(?!dollars?|bucks?|cents?|USD|units?|its|this|his|as|is|was|has|plus|less|across|always|days?)"
    r"(?:people|men|women|children|[a-z]{2,}(?<![siu])s)\b",
    re.IGNORECASE,
)
"""A plural of things, where a question asks for a unit or for money."""
_UNTIL: Final = re.compile(r"\b(?:in|within|every|after)\s*$", re.IGNORECASE)
_ASKS_WHEN: Final = re.compile(
    r"\b(?:when|how\s+(?:long|many|soon|much)|what\s+year)\b", re.IGNORECASE
)
_ASKS_FOR_ORDINAL: Final = re.compile(
    r"\b(?:which|place|position|rank\w*|ordinal|what\s+(?:day|date|floor|term|grade|century|percentile))\b",
    re.IGNORECASE,
)
_ASKS_FOR_DIFFERENCE: Final = re.compile(r"\b(?:differ\w*|compare\w*|than)\b", re.IGNORECASE)
_MIN_WORDS: Final = 3
"""Words of a question that may name a unit; a shorter one says nothing about it."""
_MAX_UNIT_WORDS: Final = 5
_MAX_REST: Final = 60
"""Characters after a number in which a word may belong to it."""


def is_other_quantity(prompt: str, expected: str, final: str) -> bool:
    """Returns True if the number of a final answer that equals the expected one is of another quantity.

    Args:
        expected: Expected answer; one that has no number at its start allows everything.
        final: Final answer of the response, or its last sentence.
    """
    expected_text = _plain(expected)
    expected_number = _NUMBER.search(expected_text)
    if expected_number is None or expected_text[: expected_number.start()].strip():
        return False
    text, value = _plain(final), _value(expected_number[0])
    numbers = [number for number in _NUMBER.finditer(text) if _value(number[0]) == value]
    if not numbers:
        return False
    number = numbers[-1]
    has_leading_zero = bool(_LEADING_ZERO.match(number[0])) and number[0] != expected_number[0]
    return has_leading_zero or _is_other(
        before=text[: number.start()],
        rest=text[number.end() : number.end() + _MAX_REST],
        expected_rest=expected_text[expected_number.end() :],
        prompt=prompt,
    )


def _is_other(*, before: str, rest: str, expected_rest: str, prompt: str) -> bool:
    asked = question.asked(prompt)
    if _ORDINAL.match(rest):
        return not (_ORDINAL.match(expected_rest) or _ASKS_FOR_ORDINAL.search(asked))
    rest = _END.split(rest, maxsplit=1)[0]
    unit, words = _unit(rest)
    if unit is not None and not _is_allowed(unit, prompt, expected_rest):
        simple, rate, period = rest.partition(
            " per "
        )  # meters per week, where the question names the week
        unit, words = _unit(simple)[0], f"{rate}{period}"
        if not rate or unit is None or not _is_allowed(unit, prompt, expected_rest):
            return True
    is_time = unit is not None and {name for name, _ in unit.dimension} <= {"time", "months"}
    is_until = is_time and _UNTIL.search(before) and not _asks_when(asked)
    if is_until or _has_other_word(words, asked, expected_rest):
        return True
    asks_for_unit = question.asked_unit(prompt) is not None or question.asks_for_money(prompt)
    return (
        asks_for_unit and unit is None and not expected_rest.strip() and bool(_COUNTED.match(words))
    )


def _asks_when(asked: str) -> bool:
    return not asked or (bool(_ASKS_WHEN.search(asked)) and not re.search(r"\bago\b", asked))


def _has_question(prompt: str) -> bool:
    return len(prompt.split()) >= _MIN_WORDS


def _plain(text: str) -> str:
    """Returns a text without fonts, layout and delimiters of formulas."""
    previous = None
    while previous != text:
        previous, text = text, _FONT.sub(r" \1 ", text)
    return _LAYOUT.sub(" ", _DEGREE.sub("°", text).replace("{,}", ","))


def _value(number: str) -> Fraction | None:
    """Returns the value of a decimal, fraction, mixed number or decimal with a power of ten."""
    sign = -1 if number.startswith("-") else 1
    power = _POWER.search(number)
    text = number[: power.start()] if power else number
    values = [
        Fraction(digits) for digits in re.findall(r"\d+(?:\.\d+)?|\.\d+", text.replace(",", ""))
    ]
    if len(values) > 1 and not values[-1]:
        return None
    whole = values[0] if len(values) != 2 else Fraction(0)
    part = values[-2] / values[-1] if len(values) > 1 else Fraction(0)
    return sign * (whole + part) * (Fraction(10) ** int(power[1]) if power else 1)


def _unit(rest: str) -> tuple[units.Unit | None, str]:
    """Returns the longest unit that a text begins with, and the text after it."""
    words = re.findall(r"\S+", rest)
    is_preposition = words[:1] == ["in"] and len(words) > 1
    if is_preposition or words[:1] == ["per"] or (words and re.match(r"[^\s\w°'\"/]", words[0])):
        return None, rest
    for end in range(min(len(words), _MAX_UNIT_WORDS), 0, -1):
        unit = units.unit_of(" ".join(words[:end]))
        if unit is not None:
            return unit, " ".join(words[end:])
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
        is_of_temperature = asked_unit.dimension[0][0] in ("celsius", "fahrenheit")
        return asked_unit == unit or (unit.is_degree and is_of_temperature)
    return question.mentions(prompt, unit)


def _has_other_word(words: str, asked: str, expected_rest: str) -> bool:
    allowed = f"{asked} {expected_rest}".casefold()
    if _KINDS["rate"].search(words) and not _ASKS_FOR_RATE.search(allowed):
        return True
    if (rate := _RATE_OF.search(words)) and _KINDS["rate"].search(words):
        noun = (rate[1] or rate[2]).casefold()
        stem = {"dai": "da", "annual": "year"}.get(noun, noun[: max(3, len(noun) - 2)])
        if noun not in _NO_NOUN and stem not in allowed:
            return True
    if (group := _KINDS["group"].match(words)) and group[1].casefold() not in allowed:
        return True
    relative = _KINDS["relative"].search(words)
    return (
        relative is not None
        and relative[1].casefold() not in allowed
        and not _ASKS_FOR_DIFFERENCE.search(allowed)
    )
