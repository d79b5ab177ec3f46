r"""1 if the response's final expression equals the answer mathematically, else 0.

``math-verify`` looks for expressions in prose and takes those that it can read: of a bare ``2\sqrt{3}``
or ``(3,1)`` only ``2`` and ``1``. So the answer and the response's final part reach it inside
``\boxed{}``, which it reads as a whole. Words, ratios and times are no expressions (it would read
``east`` as a product of four variables, ``1:2`` as a half) and count as text. Units are taken off here: it
would take the variable off ``2t`` and ``\pi r^2 h`` too.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

_MARK = "####"
_ANNOUNCED = re.compile(
    r"\b(?:answer|result)(?:\s+is)?\s*[:=]?\s*(\S.*?)\s*\.?\s*$", re.IGNORECASE | re.MULTILINE
)
_FONT = re.compile(r"\\(?:text\w*|math(?:bf|rm|it|sf)|mbox|boldsymbol|operatorname)\s*\{([^{}]*)\}")
_LAYOUT = re.compile(r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[,;:! ]|[$*~\s]|\\q?quad\b")
_CHOICE = re.compile(r"\(([a-z])\)")
_RATIO_OR_TIME = re.compile(r"\d+(?::\d+)+|\d+[ap]\.?m")
_WORDS = re.compile(
    r"\\text\w*\s*\{[^{}]*[A-Za-z]{2}|(?<![\\A-Za-z{])(?:[A-Z][a-z]{2,}|[a-z]{4,})(?![A-Za-z}])"
)
_DELIMITER = re.compile(r"\\?\$|\\[()\[\]]")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}")
_THOUSANDS = re.compile(r"(?:\{,\}|,\\!)\s*(?=\d)")
_BASE = re.compile(r"\d\w*_\{?(\d+)\}?")
_TIME = re.compile(r"\d+:\d+[ap]m")
_DOTTED = re.compile(r"(\d[ap])\.m$")
_ONE_SIGN = re.compile(r"(?<!\\)\{(\w)\}")
_OR = re.compile(r"\\text\w*\s*\{\s*(?:or|and)\s*\}")
_SAME_SIGN = {
    "\\!": "",
    "°": "^\\circ",
    "\\varnothing": "\\emptyset",
    "\\langle": "(",
    "\\rangle": ")",
}
_LETTER = re.compile(
    r"\\(?:mathbf|boldsymbol|bm|vec|hat)\s*\{\s*([A-Za-z])\s*\}|\\mathrm\s*\{\s*([ei])\s*\}"
)
_UNIT_IN_TEXT = re.compile(
    r"(?<=.)(?:[\s~]|\\[,;:! ])*"
    r"(?:\\(?:text\w*|mathrm|mbox)\s*\{[^{}]*\}(?:\^\{?-?\d\}?)?\s*(?:/|\\cdot)?\s*)+(?=,|$)"
)
_SHORT = r"cm|mm|km|dm|ft|in|yd|mi|kg|mg|gm|lb|oz|ml|mph|hr|min|sec|kmh"
_PLAIN = r"[^A-Za-z\\]*"
_QUANTITY = re.compile(
    rf"({_PLAIN}(?:\\(?:[dt]?frac|sqrt|pi|times|cdot)(?![A-Za-z]){_PLAIN})*(?<![\s^_]))"
    rf"(?:\s*(?:{_SHORT})|\s+(?:[mgshlLJNWVK]|[A-Za-z]{{3,}}))s?"
    rf"(?:\s+(?:per|{_SHORT}|[A-Za-z]{{3,}})|/\s*[a-z]+)*(?:\^\{{?\d\}}?)?\s*"
)
"""A number, and its unit in letters."""
_WITHOUT_UNITS = replace(LatexExtractionConfig().normalization_config, units=False)
_READ = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=_WITHOUT_UNITS)]
_SEARCH = [*_READ, ExprExtractionConfig()]
_SEARCH_UNITS = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
_LONGEST = 2000
"""Characters of a final answer; what repeats itself for longer is none, and would be read for minutes."""


def math_answer(prompt: str, response: str, answer: Any, row: Mapping[str, Any]) -> float:
    r"""Compare final answers.

    An answer in GSM8K's form, a derivation that ends in ``#### 72``, counts as what follows the mark. The
    response's final answer is its last ``\boxed{}``, else what follows its last mark, else what it
    announces as its answer, else the last expression in it.

    Raises:
        ValueError: If there is no answer, or it is empty.
    """
    if answer is None:
        raise ValueError("math_verify needs an answer; set data.answer_column")
    marked = _marked(str(answer))
    expected = str(answer).strip() if marked is None else marked
    if not _as_text(expected):
        raise ValueError(f"math_verify finds no expression in the answer {str(answer)[-80:]!r}")
    given = _marked(response)
    if given is None:
        announced = _ANNOUNCED.findall(response)
        given = announced[-1].strip("* ") if announced else response
        in_prose = not announced or bool(_WORDS.search(given))
    else:
        in_prose = False
    if _same_text(expected, given):
        return 1.0
    return float(not _is_text(expected) and _same_value(expected, given, in_prose=in_prose))


def _marked(text: str) -> str | None:
    """The final answer that a text marks."""
    start = text.rfind("\\boxed{")
    if start >= 0:
        return _braced(text[start + len("\\boxed{") :])
    return text.rpartition(_MARK)[2].strip() if _MARK in text else None


def _braced(text: str) -> str:
    """Text up to the brace that closes what was open before it."""
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:place]
    return text


def _as_text(answer: str) -> str:
    """An answer without fonts, spacing and case, for comparison as text."""
    previous = None
    while previous != answer:
        previous, answer = answer, _FONT.sub(r"\1", answer)
    text = _LAYOUT.sub("", answer).rstrip(".").casefold()
    return _CHOICE.sub(r"\1", _DOTTED.sub(r"\1m", _ONE_SIGN.sub(r"\1", text)))


def _same_text(expected: str, given: str) -> bool:
    """Whether two answers are the same words; of times, one may leave out the half of the day."""
    shorter, longer = sorted((_as_text(expected), _as_text(given)), key=len)
    return shorter == longer or (bool(_TIME.fullmatch(longer)) and longer[:-2] == shorter)


def _is_text(expected: str) -> bool:
    """Whether an answer is words, a ratio or a time, which have no value as an expression."""
    if _RATIO_OR_TIME.match(_as_text(expected)):
        return True
    is_number = re.match(r"[-.\d]|\\[dt]?frac|\\sqrt", _as_text(expected))
    return not is_number and bool(_WORDS.search(_OR.sub(",", expected)))


def _same_value(expected: str, given: str, *, in_prose: bool) -> bool:
    bases = {base[1] for each in (expected, given) if (base := _BASE.fullmatch(_as_text(each)))}
    if len(bases) > 1:
        return False
    gold = _read(expected)
    if in_prose:
        return any(_verify(gold, parse(given, wanted)) for wanted in (_SEARCH, _SEARCH_UNITS))
    if len(given) > _LONGEST:
        return False
    if _verify(gold, _read(given)):
        return True
    # "Which per cent?" is answered by 25 as well as by 25 %.
    in_per_cent = "%" in expected + given
    return in_per_cent and _verify(_read(_bare_number(expected)), _read(_bare_number(given)))


def _verify(gold: list[Any], found: list[Any]) -> bool:
    return bool(gold) and bool(verify(gold, found, allow_set_relation_comp=True))


def _bare_number(answer: str) -> str:
    return answer.replace("\\%", "").replace("%", "")


def _read(answer: str) -> list[Any]:
    tidy = " ".join(_DELIMITER.sub(" ", _REPEATING.sub(_as_fraction, answer)).split())
    tidy = _THOUSANDS.sub(",", _LETTER.sub(r" \1\2", tidy))
    tidy = _UNIT_IN_TEXT.sub("", tidy)
    if quantity := _QUANTITY.fullmatch(tidy):
        tidy = quantity[1]
    for sign, same in _SAME_SIGN.items():
        tidy = tidy.replace(sign, same)
    read: list[Any] = parse(f"\\boxed{{{tidy}}}", _READ, fallback_mode="no_fallback")
    return read


def _as_fraction(decimal: re.Match[str]) -> str:
    r"""``0.1\overline{6}`` as ``\frac{15}{90}``."""
    whole, fixed, repeated = decimal.groups()
    value = int(whole + fixed + repeated) - int((whole + fixed) or 0)
    return f"\\frac{{{value}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"
