r"""The form of answer that a question asks for: what ``72\%``, ``1:4`` and ``72 more`` mean there. Pure.

An answer 72 does not say whether the question asks for a number or for per cents, and ``72 more`` is an
answer only to "how many more". Without a question, these are other answers than 72.
"""

import re
from collections.abc import Set
from itertools import product
from math import prod
from typing import Final

from services.extras.math_verify import units
from services.extras.math_verify.words import AUXILIARY_VERBS, without_fonts

_PER_CENT: Final = re.compile(
    r"(?i)(?<![\d.])(?<![\d.][\s\\$}])(?<![\d.]\$\\)(?<![\d.]\s\\)\\?%|(?<!\d)(?<!\d[\s$-])per\s?cent|interest\s+rate(?!\s+of)"
)
"""A per-cent sign or word that no number precedes: ``20% of 360`` gives per cents and asks for none."""
_SENTENCE: Final = re.compile(r"(?<=[.?!])\s+|\n+")
_ASKS: Final = re.compile(
    r"(?i)\?|\b(?:what|which|how|find|express|compute|calculate|determine|give|state|evaluate|solve|estimate)\b"
)
_HOW_MANY: Final = (
    r"\b(?:how\s+many|number\s+of)\s+"
    r"(?:(?:total|more|fewer|full|whole|additional|extra|other|combined|of\s+the|consecutive)\s+)*"
)
_IN: Final = r"\b(?:in|to)\s+(?:the\s+nearest\s+)?"
_UNIT_WORDS: Final = r"[A-Za-z°]+(?:\s*/\s*[A-Za-z]+|\^[23])?(?:\s+(?:per\s+)?[A-Za-z]+){0,3}"
_COUNTS: Final = re.compile(_HOW_MANY, re.IGNORECASE)
_CONVERTS: Final = re.compile(r"(?i)\b(?:convert|chang|express)")
_ASKED_UNIT: Final = re.compile(rf"(?i)(?:{_HOW_MANY}|{_IN})(?={_UNIT_WORDS})")
_UNIT_WORD: Final = re.compile(
    r"(\d(?:\s|[-~${}]|\\[,;:! ])*)?"
    r"((?<![A-Za-z])[A-Za-zμ°][A-Za-zμ°]*(?:/[A-Za-z]+)?(?:\^[23])?|(?<=\d)['\"])"
)
_VERB: Final = re.compile(rf"(?i)\b(?:{AUXILIARY_VERBS})\b")
_SCALE_WORD: Final = re.compile(
    r"(?i)\bhow\s+many\s+(?:(?:more|full|whole|total)\s+)?(?:dozens?|hundreds|thousands|millions|billions)\b"
)
_PLAIN: Final = re.compile(
    r"\s*-?(?:(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*\\(?:times|cdot)\s*10\s*\^\s*\{?-?\d+\}?)?"
    r"|\d*\s*\\[dt]?frac\s*\{\d+\}\s*\{\d+\}|(?:\d+\s+)?\d+\s*/\s*\d+)\s*"
)
_VALUE_OF: Final = r"\b(?:of|is|find|for|compute|evaluate|calculate|determine|what['\u2019]s)"
_IN_CENTS: Final = re.compile(r"(?i)\b(?:in|how\s+many|of)\s+cents\b")
_ASKS_FOR_MONEY: Final = re.compile(
    r"(?i)\b(?:how\s+many|in)\s+(?:US\s+)?dollars\b|\bhow\s+much\b(?!\s+time)[^.?!]*\b(?:money|pays?|costs?|spen[dt]|earn|owe|charge)\b"
    r"|\bwhat\s+(?:do|does|did|will|must|would|should)\s[^.?!]*\b(?:cost|pay|owe|earn|charge)\b"
    r"|\bwhat\s+(?:is|was|will\s+be)\s+(?:the|its|his|her|their)\s+(?:\w+\s+){0,2}(?:cost|price|profit)\b"
)
_MAKES: Final = re.compile(
    r"(?i)\bhow\s+much\s+(?:more\s+|extra\s+)?(?:do|does|did|will|would|can|could|has|have)\s[^.?!,]*"
    r"\b(?:makes?|made|raised?|receives?|collect(?:ed)?|lose|lost|save[ds]?)\b(?!\s+[a-z]+\s+of\b)"
)
_SPEED: Final = re.compile(r"(?i)\b(?:speed|rate|velocity|fast|density)\b")
_COUNTS_THINGS: Final = re.compile(r"(?i)\bhow\s+many\s+(?!(?:more\s+)?dollars)")
_CENTS: Final = re.compile(r"(?i)\bcents?\b|¢")
_DOLLARS: Final = re.compile(
    r"(?i)\\\$\s*\d|\bdollars?\b|\bUSD\b|(?<![\w$\\])\$\s?\d[\d.,]*(?=[\s.,;:?!)]|$)"
)
_MONEY: Final = re.compile(
    r"(?i)\b(?:pays?|paid|costs?|prices?|spen[dt]s?|earns?|earned|money|charged?|profits?|owes?|save[sd]?)\b"
)
_DEGREES: Final = re.compile(r"(?i)\bdegrees?\b|°|\\circ")
_TEMPERATURE: Final = re.compile(r"(?i)\btemperatures?\b")
_SCALE: Final = re.compile(r"(?i)celsius|fahrenheit|kelvin|°\s*[CF]|\\circ\s*\}?\s*[CF]")
_AGE: Final = re.compile(r"(?i)\b(?:old|ages?|aged|years?)\b")
_ANGLE: Final = re.compile(
    r"(?i)\bangles?\b|\\angle|\\circ|°|\bdegrees?\b|\brotat\w+|\btemperature\b|\b(?:arc)?(?:sin|cos|tan)"
)
_RATIO: Final = re.compile(r"(?i)\bratios?\b|\bproportions?\b|(?<![\d:])\d+\s*:\s*\d+(?![\d:])")
_RATIO_WORD: Final = re.compile(r"(?i)\b(?:ratios?|proportions?|odds|scale)\b")
_CLOCK: Final = re.compile(r"\$?(\d{1,2})\s*:\s*(\d\d)\$?")
_DIFFERENCE: Final = re.compile(
    r"(?i)\bdifferences?\b|\bdiffers?\b|\bcompared?\b|\bhow\s+(?:much|many)\s+(?:longer|shorter|older|younger|taller|faster|slower)\b"
    r"|\bhow\s+many\s+(?:additional|extra|other)\b"
)
_AFTER_NUMBER: Final = r"(?<=\d)(?:\s|[}$~]|\\[,;:! ]|\\\))*(?:\\text\w*\s*\{\s*)?\s*"
_WORDS: Final = (
    r"more|less|fewer|too\s+(?:many|few|much|little)|short|higher|lower|above|below|left\s+over"
)
_COMPARISON: Final = re.compile(
    rf"(?i)(?P<before>{_AFTER_NUMBER}(?:[A-Za-z]+\s+)?)(?P<word>{_WORDS})\b"
)
_BARE_COMPARISON: Final = re.compile(
    r"(?i)^(?:\W|\\text\w*)*(?:\d[\d.,]*|\\frac\s*\{\d+\}\s*\{\d+\})"
    r"(?:\s|[}$~]|\\[,;:! ]|\\\))*(?:\\text\w*\s*\{\s*)?"
    r"\s*(?:[A-Za-z]+\s+){0,2}?(?:more|less|fewer|too\s+(?:many|few|much|little)|short|higher|lower|above|below)\b"
)
_FRACTION: Final = re.compile(
    r"\$?(?:\\[dt]?frac\s*\{((?:[^{}]|\{[^{}]*\})+)\}\s*\{((?:[^{}]|\{[^{}]*\})+)\}|\\[dt]?frac\s*(\d)\s*(\d)"
    r"|(\d+)\s*/\s*(\d+)|(\d+))\$?"
)


def asks_for_per_cent(question: str) -> bool:
    """Returns True if a question asks for a number of per cents."""
    return any(_PER_CENT.search(sentence) for sentence in _asking(question))


def asked(question: str) -> str:
    """Returns the sentences of a question that ask; all of it if none does."""
    return " ".join(_asking(question)) or question


def _asking(question: str) -> list[str]:
    return [sentence for sentence in _SENTENCE.split(question) if _ASKS.search(sentence)]


def asked_unit(question: str) -> units.Unit | None:
    """Returns the unit that a question asks for, as "How many square feet?" does; else None."""
    unit = _asked(question)
    return unit and unit[1]


def asked_unit_of_rate(question: str) -> units.Unit | None:
    """Returns ``miles`` for "How many miles per day?", which an answer may shorten; else None."""
    unit = _asked(question)
    is_rate = unit is not None and " per " in unit[0] and not _SPEED.search(question)
    amount, period = unit[0].split(" per ", 1) if unit and is_rate else ("", "")
    return units.unit_of(amount) if period else None


def with_only_unit(question: str, answer: str, dimensions: Set[tuple[tuple[str, int], ...]]) -> str:
    """Returns ``20 cm`` for the answer 20 to "How long?" if the question has no other unit of length."""
    names = {
        unit: word
        for word in _unit_words(question)
        if (unit := units.unit_of(word)) is not None and unit.dimension in dimensions
    }
    is_clear = len(names) == 1 and _PLAIN.fullmatch(answer)
    return f"{answer} {next(iter(names.values()))}" if is_clear else answer


def _asked(question: str) -> tuple[str, units.Unit] | None:
    text = without_fonts(asked(question), " ", " ").replace("$", " ")
    requested = None
    for match in _ASKED_UNIT.finditer(text):
        words = _VERB.split(text[match.end() :], maxsplit=1)[0].split()[:4]
        words = words[: words.index("in", 1)] if "in" in words[1:] else words
        for end in range(len(words), 0, -1):
            name = " ".join(words[:end]).rstrip(".?,!;:)")
            unit = units.unit_of(name)
            if unit is not None and not _is_no_unit(name, text[: match.end()]):
                requested = name, unit
                break
    return requested


def _is_no_unit(name: str, before: str) -> bool:
    """Returns True for ``in`` of "How many in total?", and for a set or person such as ``A``."""
    follows_to = before.rstrip().casefold().endswith("to")
    if name == "in":
        return not follows_to
    is_target = not follows_to or bool(_CONVERTS.search(before))
    is_letter = len(name) == 1 and name.isupper()
    return is_letter and (bool(_COUNTS.search(before)) or not is_target)


def with_asked_unit(question: str, answer: str) -> str:
    """Returns ``5 km`` for the answer 5 to "How many kilometres?"; any other answer as is."""
    unit = _asked(question)
    return f"{answer} {unit[0]}" if unit and _PLAIN.fullmatch(answer) else answer


def asks_for(question: str, term: str) -> bool:
    """Returns True if a question asks for the value of a term, as in "Find 2x"."""
    spaced = r"\s*".join(map(re.escape, term))
    return bool(
        re.search(
            rf"{_VALUE_OF}[\s$\\(]*{spaced}(?![\s$]*(?:[\d+*/^=<>-]|[A-Za-z](?![A-Za-z])))",
            question,
            re.IGNORECASE,
        )
    )


def asks_for_cents(question: str) -> bool:
    """Returns True if an amount that answers a question is in cents."""
    return bool(_IN_CENTS.search(asked(question)))


def asks_for_scale(question: str) -> bool:
    """Returns True if a question asks for a number of dozens or of millions."""
    return bool(_SCALE_WORD.search(question))


def asks_for_money(question: str) -> bool:
    """Returns True if a question asks for an amount of money, and not how many things it buys."""
    text = asked(question)
    is_asked = _ASKS_FOR_MONEY.search(text) or (_MAKES.search(text) and _DOLLARS.search(question))
    return bool(is_asked) and not _COUNTS_THINGS.search(text)


def counts_things(question: str) -> bool:
    """Returns True if a question asks how many, and not how many dollars, even if it omits the noun."""
    return bool(_COUNTS_THINGS.search(asked(question)))


def asks_for_amount(question: str) -> bool:
    """Returns True if a question asks for an amount of money, perhaps beside other things."""
    return bool(_ASKS_FOR_MONEY.search(asked(question)))


def asks_for_dollars(question: str) -> bool:
    """Returns True if an amount that answers a question is in dollars, so that cents are hundredths."""
    text = asked(question)
    if _CENTS.search(text):
        return False
    if _DOLLARS.search(text):
        return True
    return bool(_DOLLARS.search(question) or _MONEY.search(text)) and not _CENTS.search(question)


def asks_for_age(question: str) -> bool:
    """Returns True if a question is about an age, which is in years if it names no unit."""
    return bool(_AGE.search(question))


def has_money(question: str) -> bool:
    """Returns True if a question is about money."""
    return bool(_DOLLARS.search(question) or _CENTS.search(question) or _MONEY.search(question))


def has_unit_of(question: str, dimensions: Set[tuple[tuple[str, int], ...]]) -> bool:
    """Returns True if a question has a unit of one of the dimensions, or of their base."""
    names = {name for dimension in dimensions for name, _ in dimension}
    return any({name for name, _ in unit.dimension} <= names for unit in _units_of(question))


def mentions(question: str, unit: units.Unit) -> bool:
    """Returns True if a question has a unit, or those that it is a product of, as ``m`` for ``m^2``."""
    if unit == units.unit_of("years") and _AGE.search(question):
        return True
    names = {name for name, _ in unit.dimension}
    if names <= {"angle", "radians"}:
        is_other = names == {"radians"} and _DEGREES.search(question) and "radian" not in question
        return bool(_ANGLE.search(question)) and not is_other
    if names <= {"celsius", "fahrenheit"} and _TEMPERATURE.search(question):
        return not _SCALE.search(question) or unit in _units_of(question)
    mentioned = _units_of(question)
    if unit in mentioned:
        return True
    sizes = [
        [base.size**power for base in mentioned if base.dimension == ((name, 1),)]
        for name, power in unit.dimension
    ]
    return any(prod(factors) == unit.size for factors in product(*sizes))


def _units_of(question: str) -> set[units.Unit]:
    """Returns the units that a question has: symbols after numbers, and words."""
    return {unit for word in _unit_words(question) if (unit := units.unit_of(word)) is not None}


def _unit_words(question: str) -> set[str]:
    """Returns words that may be units: letters after numbers, and longer words."""
    words = set[str]()
    for match in _UNIT_WORD.finditer(without_fonts(question, " ", " ")):
        if match[1] or len(match[2]) > 2:
            words |= {match[2], *match[2].split("/")}
    return words - {""}


def as_ratio(question: str, answer: str) -> str | None:
    """Returns ``3:4`` for the answer ``3/4`` of a question about a ratio, ``3:1`` for 3; else None.

    ``3:20``, which may be a time, is ``3 to 20``.
    """
    if _RATIO_WORD.search(question) and (clock := _CLOCK.fullmatch(answer.strip())):
        return f"{clock[1]} to {clock[2]}"
    fraction = _FRACTION.fullmatch(answer.strip())
    if fraction is None or not _RATIO.search(question):
        return None
    above, *below = [group for group in fraction.groups() if group is not None]
    return f"{above}:{below[0] if below else 1}"


def without_comparisons(question: str, response: str) -> str:
    """Removes words such as ``more`` after numbers if the question asks how many more."""
    text = question.casefold()
    is_difference = bool(_DIFFERENCE.search(text))

    def shortened(match: re.Match[str]) -> str:
        word = " ".join(match["word"].casefold().split())
        is_asked = is_difference or re.search(rf"\b{word}\b", text)
        return match["before"] if is_asked else match[0]

    return _COMPARISON.sub(shortened, response)


def is_comparison(answer: str) -> bool:
    """Returns True if an answer begins with a difference, such as ``72 more`` and ``72 apples too many``."""
    return bool(_BARE_COMPARISON.match(answer))


_CONDITION: Final = re.compile(
    r"\s+(?=(?:(?<=%\s)of|in|over|after|for|during|within|on|at|by|with|from)\s+(?:[a-z]+\s+){0,5}?\d[^=\n]*$)"
)
_NUMBER_OF: Final = re.compile(r"\d[\d,.]*(?:\s+[A-Za-z]+)?")
_ASKED_BOUND: Final = re.compile(
    r"(?i)\b(after|before|until|at\s+least|at\s+most|more\s+than|less\s+than)\s+how\s+(?:many|much|long)\b"
)


_OUT_OF: Final = re.compile(
    r"(?i)(?P<before>\d[^\n=]*?)\s*,?\s+out\s+of\s+(?:the\s+|a\s+(?:total\s+of\s+)?|all\s+)?(?:total\s+)?\d[\d,]*(?![\d.%/])"
    r"|(?P<part>(?<![\d.,/%])\d[\d,]*)(?:\s+of)\s+(?:the|all)\s+\d[\d,]*(?=\s+[a-z])(?![^\n]*=)"
)


def without_whole(question: str, response: str) -> str:
    """Removes the whole of which the last number is a part if a question asks how many: ``out of 20``."""
    if not _ASKS_HOW_MANY.search(question) or " of " not in response:
        return response
    before, line_break, line = response.rstrip().rpartition("\n")
    return (
        f"{before}{line_break}{_OUT_OF.sub(lambda match: match['before'] or match['part'], line)}"
    )


_ASKS_HOW_MANY: Final = re.compile(r"(?i)\b(?:how\s+(?:many|much)|number\s+of)\b")
_RESTATES: Final = re.compile(
    r"(?i)\b(?:compute|evaluate|simplify|calculate|expand|factor(?:ise|ize)?|solve|rationali[sz]e|what\s+is|work\s+out|find"
    r"|convert|reduce)\s+(?:the\s+)?(?:(?:value|sum|product|following|expression|fraction|integral|limit|equation"
    r"|inequality|of|quantity|completely|exactly)\s+)*(?::\s*)?"
)
_OPERATION: Final = re.compile(r"\d\s*[A-Za-z]|[+*/^!|<>]|(?<=\w)\s*-|\\[A-Za-z]+|\)\s*\(")
_SIMPLE_FRACTION: Final = re.compile(
    r"\\[dt]?frac\s*(?:\{\s*(\w+)\s*\}\s*\{\s*(\w+)\s*\}|(\d)\s*(\d))"
)
_NO_SIGN: Final = re.compile(
    r"\\(?:left|right|displaystyle|cdot|times)(?![A-Za-z])|[\s$*{}.?]|\\[,;:! ()\[\]]|dfrac"
)


def is_restated(question: str, expected: str, answer: str) -> bool:
    """Returns True if an answer is the expression that a question asks to compute or to rewrite."""
    text = _compact_formula(answer)
    # The expected answer may be the same expression with its terms in another order.
    is_expected = sorted(text) == sorted(_compact_formula(expected))
    if len(text) < _MIN_FORMULA or not _OPERATION.search(answer) or is_expected:
        return False
    return any(
        _starts_with(_compact_formula(question[match.end() :]), text)
        for match in _RESTATES.finditer(question)
    )


def _starts_with(text: str, formula: str) -> bool:
    """Returns True if a formula begins a text and does not go on there."""
    return text.startswith(formula) and not re.match(
        r"[\d+\-*/^=<>_!(]|\\[a-z]", text[len(formula) :]
    )


def _compact_formula(text: str) -> str:
    return _NO_SIGN.sub("", _SIMPLE_FRACTION.sub(r"\1\3/\2\4", text))


def without_echo(question: str, response: str) -> str:
    """Removes words of the question from a last line: ``in 5 days`` at its end, ``after`` before a number."""
    line = response.rstrip().rpartition("\n")[2]
    shortened = line
    for condition in _CONDITION.finditer(line):
        before, after = line[: condition.start()], line[condition.end() :]
        if re.search(r"\d", before) and all(
            re.search(rf"(?<![\d.,]){re.escape(number)}\b", question, re.IGNORECASE)
            for number in _NUMBER_OF.findall(after.rstrip(" .!"))
        ):
            shortened = before
            break
    if bound := _ASKED_BOUND.search(question):
        shortened = re.sub(rf"\b{bound[1]}\s+(?=\d)", "", shortened, flags=re.IGNORECASE)
    return response.rstrip()[: -len(line)] + shortened if shortened != line else response


_DOUBT: Final = r"but|or|however|although|though|unless|except|maybe|perhaps|possibly"
_ANSWERED: Final = re.compile(
    rf"(?i)^(\s*(?:(?:so\s+)?the\s+answer\s+is:?\s+)?(?:yes|true)[,.;:]\s+(?!.*\b(?:no|not|never|false|wrong|incorrect|fails?|{_DOUBT})\b|.*n['\u2019]t\b).*"
    rf"|\s*(?:(?:so\s+)?the\s+answer\s+is:?\s+)?(?:no|false)[,.;:]\s+(?!.*\b(?:yes|true|right|correct|{_DOUBT})\b).*)$"
)
"""One line that answers a yes-or-no question and says more, which does not take it back."""
_REASON: Final = re.compile(
    r"(?:,\s*|\s+)?\((?:(?:since|because|as|for)\s[^()]*|[^()]*\d[^()]*\b(?:extraneous|rejected|discarded))\)"
    r"|(?P<before>^[^\n]*?)(?:[,.:][^\S\n]*|[^\S\n]+)(?:because|since)\b(?<!\.\sSince)"
    r"(?![^\n]*(?:\\boxed|####|answer|\b(?:so|thus|hence|therefore)\b))[^\n]*",
    re.IGNORECASE | re.MULTILINE,
)
_MAX_WORDS_BEFORE: Final = 4
_MIN_FORMULA: Final = 3


def without_reason(response: str) -> str:
    """Removes reasons after an answer: ``72 (since 6 * 12)`` and ``no, because 91 = 7 * 13``."""

    def shortened(match: re.Match[str]) -> str:
        before = match["before"] or ""
        is_answer = re.search(r"\d", before) or 0 < len(before.split()) <= _MAX_WORDS_BEFORE
        return before if is_answer or match["before"] is None else match[0]

    if _ANSWERED.match(response.strip()):
        return re.split(r"[,.;:]", response, maxsplit=1)[0]
    return _REASON.sub(shortened, response)
