r"""Currencies, separators of thousands, and words that scale a number. Pure.

``Rs. 5`` and ``1_234`` are plain numbers to a reader, ``72 dozen`` and ``5 million`` others than 72 and 5.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Final

_SIGNS: Final = "€£¥₹₩₽₺₱₫฿₦₪₴₸₵₡₲₭₮₼₾"
_CODES: Final = (
    r"USD|EUR|GBP|INR|JPY|CNY|RMB|CHF|AUD|CAD|NZD|HKD|SGD|TWD|KRW|RUB|TRY|BRL|MXN|ZAR|SEK|NOK|DKK|ISK|PLN"
    r"|CZK|HUF|RON|THB|IDR|MYR|PHP|VND|NGN|KES|EGP|ILS|SAR|AED|PKR|BDT|LKR|Rs\.?|kr\.?|Kč|zł|Ft"
)
_FONT: Final = r"\\(?:text\w*|mathrm|mbox|operatorname)\s*\{\s*"
_SPACE: Final = r"(?:[\s~]|\\[,;:! ])*"
_NAME: Final = (
    rf"(?:{_CODES}|[{_SIGNS}]|\\(?:euro|pounds|EUR|texteuro|rupee)(?![A-Za-z])(?:\{{\}})?)"
)
_CURRENCY_BEFORE: Final = re.compile(
    rf"(?<![A-Za-z\\])(?:{_FONT}{_NAME}\s*\}}|{_NAME}){_SPACE}(?=-?\$?-?\.?\d)"
)
_CURRENCY_AFTER: Final = re.compile(
    rf"(?<=\d){_SPACE}(?:{_FONT}(?:{_NAME}|¢|/-)\s*\}}|(?:{_NAME}|¢|/-))(?![A-Za-z])"
)
_DOLLAR_OF: Final = re.compile(
    r"(?<![A-Za-z\\$])(?:US|CA|AU|NZ|HK|NT|SG|MX|[ACRS])\s?(?=\\?\$\s?\d)(?!\\?\$[^$\n]*(?<!\\)\$)"
)
_GROUPED: Final = re.compile(
    r"(?<![\w.,'\u2019])\d{1,3}(?:(?:_\d{3})+|(?:['\u2019]\d{3})+|(?:\.\d{3}){2,})(?![\w'\u2019]|\.\d{3})"
)
_GROUPED_BEFORE_COMMA: Final = re.compile(
    r"(?<![\w.,])(\d{1,3}(?:\.\d{3})+),(\d{1,2})(?![\d,]|\.\d)"
)
_INDIAN: Final = re.compile(r"\d{1,2}(?:,\d{2})+,\d{3}(?:\.\d+)?")

_SCALES: Final[Mapping[str, Fraction]] = {
    "dozen": Fraction(12),
    "hundred": Fraction(100),
    "thousand": Fraction(1000),
    "myriad": Fraction(10**4),
    "lakh": Fraction(10**5),
    "lac": Fraction(10**5),
    "million": Fraction(10**6),
    "mil": Fraction(10**6),
    "mn": Fraction(10**6),
    "mln": Fraction(10**6),
    "crore": Fraction(10**7),
    "billion": Fraction(10**9),
    "bn": Fraction(10**9),
    "bln": Fraction(10**9),
    "trillion": Fraction(10**12),
    "tn": Fraction(10**12),
    "quadrillion": Fraction(10**15),
    "quintillion": Fraction(10**18),
    "googol": Fraction(10**100),
    "halves": Fraction(1, 2),
    "thirds": Fraction(1, 3),
    "fifths": Fraction(1, 5),
    "sixths": Fraction(1, 6),
    "sevenths": Fraction(1, 7),
    "eighths": Fraction(1, 8),
    "ninths": Fraction(1, 9),
    "tenths": Fraction(1, 10),
    "twelfths": Fraction(1, 12),
    "hundredths": Fraction(1, 100),
    "thousandths": Fraction(1, 1000),
    "millionths": Fraction(1, 10**6),
    "billionths": Fraction(1, 10**9),
    "per mille": Fraction(1, 1000),
    "‰": Fraction(1, 1000),
    "\\permil": Fraction(1, 1000),
    "\\textperthousand": Fraction(1, 1000),
    "ppm": Fraction(1, 10**6),
    "parts per million": Fraction(1, 10**6),
    "ppb": Fraction(1, 10**9),
    "parts per billion": Fraction(1, 10**9),
    "basis point": Fraction(1, 10**4),
    "bps": Fraction(1, 10**4),
}
_AT_END: Final[Mapping[str, Fraction]] = {"score": Fraction(20), "gross": Fraction(144)}
"""Words that scale a number only at the end of an answer; elsewhere they mean something else."""
_LETTERS: Final[Mapping[str, Fraction]] = {
    "k": Fraction(1000),
    "K": Fraction(1000),
    "M": Fraction(10**6),
    "B": Fraction(10**9),
}
_WORDS: Final = "|".join(sorted(map(re.escape, _SCALES), key=len, reverse=True))
_NUMBER: Final = r"(?<![\w.,/^])(?:\d{1,3}(?:(?:,|\{,\}|\\,)\d{3})+|\d+)(?:\.\d+)?|(?<![\w.])\.\d+"
_CLOSING: Final = r"(?:\$|\\\))?"
_SCALED: Final = re.compile(
    rf"(?P<number>{_NUMBER})(?P<closing>{_CLOSING})(?:[\s~-]|\\[,;:! ])*"
    rf"(?P<font>{_FONT})?(?:(?P<word>{_WORDS})s?(?![A-Za-z])"
    rf"|(?P<last>{'|'.join(_AT_END)})(?=\s*\}}*[\s.$]*$))",
    re.IGNORECASE,
)
_LETTER_SCALED: Final = re.compile(
    rf"(?P<number>{_NUMBER})(?P<closing>)(?P<font>\s*{_FONT})?"
    r"(?P<word>(?<=[\d{])[kKMB]|(?<=[\d{]) k)(?![A-Za-z\d^_*(+/-])"
)
_PER_CENT: Final = re.compile(
    rf"(?<=[\d$}}]){_SPACE}(?:{_FONT}(?:per\s?cent|pct\.?)\s*\}}|(?:per\s?cent|pct\.?)(?![A-Za-z]))"
)
_UNITS: Final = {
    word: number
    for number, word in enumerate(
        [
            *(
                "zero",
                "one",
                "two",
                "three",
                "four",
                "five",
                "six",
                "seven",
                "eight",
                "nine",
                "ten",
            ),
            *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen"),
            *("eighteen", "nineteen"),
        ]
    )
}
_TENS: Final = {
    word: 10 * number
    for number, word in enumerate(
        ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"), start=2
    )
}
_ORDERS: Final = ("thousand", "million", "billion", "trillion")
_MAX_WORDS: Final = 16


def plain_amounts(text: str) -> str:
    """Removes currencies beside numbers, and separators of thousands that nothing else uses."""
    text = _DOLLAR_OF.sub("", text)
    text = _CURRENCY_AFTER.sub("", _CURRENCY_BEFORE.sub("", text))
    text = _GROUPED_BEFORE_COMMA.sub(lambda part: f"{part[1].replace('.', '')}.{part[2]}", text)
    return _GROUPED.sub(lambda part: re.sub(r"\D", "", part[0]), text)


def without_indian_groups(number: str) -> str:
    """Returns ``12,34,567`` without separators; any other text as is."""
    return number.replace(",", "") if _INDIAN.fullmatch(number) else number


def scaled(text: str, *, has_letters: bool) -> str:
    r"""Multiplies numbers by the words after them: ``72 dozen`` becomes ``864``, ``5 per cent`` ``5\%``.

    Args:
        has_letters: True if letters such as ``k`` may be variables, so that they scale nothing.
    """
    text = _PER_CENT.sub(r"\\%", text)
    text = _SCALED.sub(_product, text)
    return text if has_letters else _LETTER_SCALED.sub(_product, text)


def unscaled(text: str) -> str:
    """Returns a text without the words that scale a number."""
    return _SCALED.sub(lambda part: f"{part['number']}{part['closing']}{part['font'] or ''}", text)


def _product(part: re.Match[str]) -> str:
    groups = part.groupdict()
    word = (groups["word"] or groups.get("last") or "").strip()
    scale = _LETTERS.get(word) or {**_SCALES, **_AT_END}[word.casefold()]
    value = Fraction(re.sub(r"[^\d.]", "", part["number"])) * scale
    return f"{_written(value)}{part['closing']}{part['font'] or ''}"


def _written(value: Fraction) -> str:
    """Returns a decimal if one equals the value, else a fraction."""
    if value.denominator == 1:
        return str(value.numerator)
    if 10**12 % value.denominator == 0:
        digits = f"{value.numerator * (10**12 // value.denominator):013d}"
        return f"{digits[:-12]}.{digits[-12:].rstrip('0')}"
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def number_of_words(text: str) -> str | None:
    """Returns the number that words spell, such as ``seventy-two`` or ``half a dozen``; None for others."""
    words = [word for word in re.split(r"[\s-]+", text.strip().casefold()) if word != "and"]
    if not words or len(words) > _MAX_WORDS:
        return None
    if len(words) > 2 and words[:2] == ["half", "a"]:
        scale = _SCALES.get(words[2])
        return _written(scale / 2) if len(words) == 3 and scale else None
    if words[0] in ("a", "an") and len(words) > 1:
        words[0] = "one"
    total = current = Fraction(0)
    previous = ""
    for word in words:
        if word in _UNITS:
            if previous in _UNITS or current % 10 or (current % 100 and _UNITS[word] >= 10):
                return None
            current += _UNITS[word]
        elif word in _TENS and current % 100 == 0 and previous not in _UNITS:
            current += _TENS[word]
        elif word.removesuffix("s") in ("hundred", "dozen") and previous:
            current *= _SCALES[word.removesuffix("s")]
        elif word in _ORDERS and current:
            total, current = total + current * _SCALES[word], Fraction(0)
        else:
            return None
        previous = word
    return _written(total + current)
