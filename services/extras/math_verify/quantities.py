r"""Currencies, separators of thousands, and words that scale a number. Pure.

``Rs. 5`` and ``1_234`` are plain numbers to a reader, ``72 dozen`` and ``5 million`` others than 72 and 5.
"""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Final

from services.extras.math_verify.words import FONT, table

SIGNS: Final = "€£¥₹₩₽₺₱₫฿₦₪₴₸₵₡₲₭₮₼₾元円원"
CODES: Final = (
    r"USD|EUR|GBP|INR|JPY|CNY|RMB|CHF|AUD|CAD|NZD|HKD|SGD|TWD|KRW|RUB|TRY|BRL|MXN|ZAR|SEK|NOK|DKK|ISK|PLN"
    r"|CZK|HUF|RON|THB|IDR|MYR|PHP|VND|NGN|KES|EGP|ILS|SAR|AED|PKR|BDT|LKR|Rs\.?|kr\.?|Kč|zł|Ft"
)
_SPACE: Final = r"(?:[\s~]|\\[,;:! ])*"
_NAME: Final = rf"(?:{CODES}|[{SIGNS}]|\\(?:euro|pounds|EUR|texteuro|rupee)(?![A-Za-z])(?:\{{\}})?)"
_CURRENCY_BEFORE: Final = re.compile(
    rf"(?<![A-Za-z\\])(?:{FONT}{_NAME}\s*\}}|{_NAME}){_SPACE}(?=-?\$?-?\.?\d)"
)
_CURRENCY_AFTER: Final = re.compile(
    rf"(?<=\d){_SPACE}(?:{FONT}(?:{_NAME}|¢|/-)\s*\}}|(?:{_NAME}|¢|/-))(?![A-Za-z])"
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
    word.replace("_", " "): Fraction(scale)
    for word, scale in table(
        "dozen:12 hundred:100 thousand:1e3 myriad:1e4 lakh:1e5 lac:1e5 million:1e6 mil:1e6 mn:1e6",
        "mln:1e6 crore:1e7 billion:1e9 bn:1e9 bln:1e9 trillion:1e12 tn:1e12 quadrillion:1e15",
        "quintillion:1e18 googol:1e100 halves:1/2 thirds:1/3 fifths:1/5 sixths:1/6 sevenths:1/7",
        "eighths:1/8 ninths:1/9 tenths:1/10 twelfths:1/12 hundredths:1e-2 thousandths:1e-3",
        "millionths:1e-6 billionths:1e-9 ppm:1e-6 ppb:1e-9 bps:1e-4 per_mille:1e-3 basis_point:1e-4",
        r"parts_per_million:1e-6 parts_per_billion:1e-9 ‰:1e-3 \permil:1e-3 \textperthousand:1e-3",
    ).items()
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
    rf"(?i)(?P<number>{_NUMBER})(?P<closing>{_CLOSING})(?:[\s~-]|\\[,;:! ])*"
    rf"(?P<font>{FONT})?(?:(?P<word>{_WORDS})s?(?![A-Za-z])"
    rf"|(?P<last>{'|'.join(_AT_END)})(?=\s*\}}*[\s.$]*$))"
)
_LETTER_SCALED: Final = re.compile(
    rf"(?P<number>{_NUMBER})(?P<closing>)(?P<font>\s*{FONT})?"
    r"(?P<word>(?<=[\d{])[kKMB]|(?<=[\d{]) k)(?![A-Za-z\d^_*(+/-])"
)
_PER_CENT_WORD: Final = r"(?:per\s?cent(?:age\s+points?)?|pct\.?)"
_PER_CENT: Final = re.compile(
    rf"(?<=[\d$}}]){_SPACE}(?:{FONT}{_PER_CENT_WORD}\s*\}}|{_PER_CENT_WORD}(?![A-Za-z]))"
)
_UNITS: Final = {
    word: number
    for number, word in enumerate(
        re.findall(
            r"\w+",
            "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
            " sixteen seventeen eighteen nineteen",
        )
    )
}
_TENS: Final = {
    word: 10 * number
    for number, word in enumerate(
        ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"), start=2
    )
}
_PARTS: Final[Mapping[str, int]] = {
    part: int(number)
    for part, number in table(
        "half:2 third:3 quarter:4 fourth:4 fifth:5 sixth:6 seventh:7 eighth:8 ninth:9",
        "tenth:10 twelfth:12 twentieth:20 hundredth:100",
    ).items()
}
_NEGATIVE: Final = ("minus", "negative")
_ORDERS: Final = ("thousand", "million", "billion", "trillion")
_WORD_OF_NUMBER: Final = rf"(?:{'|'.join((*_UNITS, *_TENS, *_ORDERS))}|hundred)"
_WORDS_OF_NUMBER: Final = re.compile(
    rf"(?i)\b{_WORD_OF_NUMBER}(?:(?:\s+|-|,\s+|\s+and\s+){_WORD_OF_NUMBER})*\b(?!\s*(?:and\s+a\s+|dozen|times))"
)
_MAX_WORDS: Final = 16
_MAX_NOUN_WORDS: Final = 3
_NOUN: Final = re.compile(
    rf"(?i)(?!(?:{'|'.join((*_UNITS, *_TENS, *_ORDERS, *_PARTS))}|hundred|dozen|halve|and|or|not|less|more"
    r"|fewer|than|of|times|time|point|over|to|by|plus|minus|out|each|if|half|is|was|are|were)s?\b)[A-Za-z]+[.,]?"
)
"""Word after a number that may name what is counted."""
_CENTS: Final = re.compile(
    rf"(?<![\w.,])(\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?){_CLOSING}{_SPACE}(?:{FONT})?(?:cents?(?![A-Za-z])|¢)\s*\}}?"
)
_DOLLARS_AND_CENTS: Final = re.compile(
    r"(?i)(?<![\w.,])(\d+)\s+dollars?\s*(?:,|and)?\s+(\d{1,2})\s+cents?\b"
)
_DOLLARS: Final = re.compile(r"(?i)\\\$\s*-?[\d.]|\bdollars?\b|\bUSD\b")
_AMOUNT_OF_DOLLARS: Final = re.compile(
    r"\\?\$\s*(\d[\d,]*(?:\.\d+)?)\$?|(?<![\w.,])(\d[\d,]*(?:\.\d+)?)\s*(?:dollars?\b|USD\b)"
)
_DOLLAR_SIGN: Final = re.compile(r"(?<![\w$\\])-?\$\s*-?[\d.]")
_CURRENCIES: Final[Mapping[str, str]] = table(
    r"€:EUR £:GBP ¥:JPY ₹:INR ₩:KRW ₽:RUB USD:USD EUR:EUR GBP:GBP INR:INR JPY:JPY \$:USD"
)
_CURRENCY_WORDS: Final[Mapping[str, str]] = table(
    "euro:EUR yen:JPY yuan:CNY rupee:INR ruble:RUB peso:MXN franc:CHF",
)
_NAMED_CURRENCY: Final = re.compile(
    "|".join(map(re.escape, _CURRENCIES)) + rf"|\b(?i:{'|'.join(_CURRENCY_WORDS)})s?\b"
)
_SIGN_BEFORE_DOLLAR: Final = re.compile(r"(?<![\w)}])-\s*(\\?\$)\s*(?=[\d.])")
_HEXADECIMAL: Final = re.compile(r"(?i)(?<![\w.\\])0(?:x[\da-f]{2,}|b[01]{2,}|o[0-7]{2,})(?!\w)")


def plain_amounts(text: str) -> str:
    """Removes currencies beside numbers, and separators of thousands that nothing else uses."""
    text = _HEXADECIMAL.sub(lambda number: str(int(number[0], 0)), text)
    text = _SIGN_BEFORE_DOLLAR.sub(r"\1-", _DOLLAR_OF.sub("", text))
    text = _CURRENCY_AFTER.sub("", _CURRENCY_BEFORE.sub("", text))
    text = _GROUPED_BEFORE_COMMA.sub(lambda match: f"{match[1].replace('.', '')}.{match[2]}", text)
    return _GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), text)


def without_indian_groups(number: str) -> str:
    """Returns ``12,34,567`` without separators; any other text as is."""
    return number.replace(",", "") if _INDIAN.fullmatch(number) else number


def scaled(text: str, *, has_letters: bool) -> str:
    r"""Multiplies numbers by the words after them: ``72 dozen`` becomes ``864``, ``5 per cent`` ``5\%``.

    Args:
        has_letters: True if letters such as ``k`` may be variables, so that they scale nothing.
    """
    text = _SCALED.sub(_product, per_cents(text))
    return text if has_letters else _LETTER_SCALED.sub(_product, text)


def per_cents(text: str) -> str:
    """Replaces the words ``per cent`` after numbers by the sign."""
    return _PER_CENT.sub(r"\\%", text)


def unscaled(text: str) -> str:
    """Returns a text without the words that scale a number."""
    return _SCALED.sub(
        lambda match: f"{match['number']}{match['closing']}{match['font'] or ''}", text
    )


def _product(match: re.Match[str]) -> str:
    groups = match.groupdict()
    word = (groups["word"] or groups.get("last") or "").strip()
    scale = _LETTERS.get(word) or {**_SCALES, **_AT_END}[word.casefold()]
    value = Fraction(re.sub(r"[^\d.]", "", match["number"])) * scale
    return f"{_written(value)}{match['closing']}{match['font'] or ''}"


def _written(value: Fraction) -> str:
    """Returns a decimal if one equals the value, else a fraction."""
    if value.denominator == 1:
        return str(value.numerator)
    if 10**12 % value.denominator == 0:
        digits = f"{value.numerator * (10**12 // value.denominator):013d}"
        return f"{digits[:-12]}.{digits[-12:].rstrip('0')}"
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def number_of_words(text: str) -> str | None:
    """Returns the number that words spell; None for others.

    Examples are ``seventy-two``, ``half a dozen``, ``minus five``, ``three quarters`` and ``one and a half``.
    """
    words = [word for word in re.split(r"(?:\s|(?<=[a-z]),|-)+", text.strip().casefold()) if word]
    sign = "-" if words and words[0] in _NEGATIVE else ""
    words = words[len(sign) :]
    if not words or len(words) > _MAX_WORDS:
        return None
    if len(words) > 2 and words[:2] == ["half", "a"]:
        scale = _SCALES.get(words[2])
        return f"{sign}{_written(scale / 2)}" if len(words) == 3 and scale else None
    scale = Fraction(1)
    if len(words) > 2 and words[-1] in _ORDERS and {*words} & _PARTS.keys():
        scale = _SCALES[words.pop()]
    value = _mixed_number(words)
    return None if value is None else f"{sign}{_written(value * scale)}"


def _mixed_number(words: Sequence[str]) -> Fraction | None:
    """Returns the value of words such as ``two and three quarters``."""
    below = _PARTS.get(words[-1].removesuffix("s").replace("halve", "half"))
    if below is None:
        return _whole_number(words)
    start = len(words) - words[::-1].index("and") if "and" in words else 0
    parts = ["one" if word == "a" else word for word in words[start:-1]]
    above = _whole_number(parts) if parts else Fraction(words[-1] == "half")
    whole = _whole_number(words[: start - 1]) if start else Fraction(0)
    is_plural = words[-1] not in _PARTS
    if not above or whole is None or is_plural == (above == 1):
        return None
    return whole + above / below


def _whole_number(words: Sequence[str]) -> Fraction | None:
    words = [word for word in words if word != "and"]
    if len(words) > 1 and words[0] in ("a", "an"):
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
    return total + current if previous else None


def with_digits(answer: str) -> str:
    """Writes the number that an answer's first words spell in digits: ``five hours`` becomes ``5 hours``."""
    words = answer.strip(" .$").split()
    for end in range(min(len(words), _MAX_WORDS), 0, -1):
        noun = words[end:]
        is_noun = len(noun) <= _MAX_NOUN_WORDS and all(map(_NOUN.fullmatch, noun))
        if is_noun and (number := number_of_words(" ".join(words[:end]))) is not None:
            return " ".join([number, *noun])
    return answer


def with_digits_in_line(line: str) -> str:
    """Writes the only number of a line, which is in words, in digits: ``He has twelve apples left``."""
    runs = [run for run in _WORDS_OF_NUMBER.finditer(line) if number_of_words(run[0]) is not None]
    if len(runs) != 1 or re.search(r"\d", line):
        return line
    run = runs[0]
    return f"{line[: run.start()]}{number_of_words(run[0])}{line[run.end() :]}"


def in_dollars(response: str) -> str:
    """Converts amounts in cents to dollars."""
    response = _DOLLARS_AND_CENTS.sub(
        lambda parts: f"{parts[1]}.{int(parts[2]):02d} dollars", response
    )
    return _CENTS.sub(
        lambda match: _written(Fraction(re.sub(r"[,\s]", "", match[1])) / 100), response
    )


def in_cents(response: str) -> str:
    """Converts amounts in dollars to cents."""
    return _AMOUNT_OF_DOLLARS.sub(
        lambda match: _written(100 * Fraction((match[1] or match[2]).replace(",", ""))), response
    )


def is_in_dollars(answer: str) -> bool:
    """Returns True if an answer is an amount of dollars and no formula between two ``$``."""
    return bool(_DOLLARS.search(answer)) or (
        answer.count("$") % 2 == 1 and bool(_DOLLAR_SIGN.search(answer))
    )


def other_currencies(answer: str, response: str, question: str = "") -> bool:
    """Returns True if the last amount of a response is in a currency that neither answer nor question has.

    Without a currency in both, a question allows dollars; without a question, any currency is allowed.
    """
    amounts = _currencies(response) or ["USD"] * is_in_dollars(response)
    expected = {*_currencies(answer), *(["USD"] * is_in_dollars(answer))}
    if not expected and question.strip():
        is_dollar = bool(_DOLLARS.search(question) or _DOLLAR_SIGN.search(question))
        question_currencies = {*_currencies(question), *(["USD"] * is_dollar)}
        expected = question_currencies or {"USD"}
    return bool(expected and amounts) and amounts[-1] not in expected


def _currencies(text: str) -> list[str]:
    return [
        _CURRENCIES.get(name[0]) or _CURRENCY_WORDS[name[0].casefold().removesuffix("s")]
        for name in _NAMED_CURRENCY.finditer(text)
    ]
