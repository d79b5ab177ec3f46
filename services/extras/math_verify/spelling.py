r"""Normalizes the many spellings of an answer, as text to compare and as LaTeX for ``math-verify``. Pure.

Words, ratios and times are not expressions: ``math-verify`` would parse ``east`` as a product of
four variables and ``1:2`` as a half. Units are removed here, because it would also remove the
variable of ``2t`` and ``\pi r^2 h``. In ``math_answers.json`` of the tests, ``math-verify`` 0.9 alone refuses
158 of 821 right answers and accepts 28 of 820 wrong answers; with this module, it does neither.
"""

import re
import unicodedata
from fractions import Fraction
from typing import Final

from services.extras.math_verify.quantities import (
    number_of_words,
    per_cents,
    with_digits,
    without_indian_groups,
)

_FONT = re.compile(
    r"\\(?:text(?!color)\w*|math(?:bf|rm|it|sf)|mbox|boldsymbol|operatorname)\s*\{([^{}]*)\}"
)
_INVISIBLE = re.compile(
    r"\\[hv]?phantom\s*\{[^{}]*\}|\\(?:text)?color\s*\{[^{}]*\}"
    r"|\\(?:tiny|small|normalsize|large|Large|LARGE|huge|Huge)(?![A-Za-z])\s*"
)
_UNDERLINED = re.compile(r"\\underline\s*(?=\{)")
_SPACED_DIGITS = re.compile(r"(?<=\d)(?:\s|~|\\[,;:! ]|\\q?quad\b)+(?=\d)")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\s|~|\\[,;:! ])\d{3})+(?![\d/])")
_RAISED: Final = str.maketrans(
    "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₙᵢ", "0123456789+-=()ni0123456789+-=()ni"
)
_RAISED_TEXT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ]+|[₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₙᵢ]+")
_DASH = re.compile(r"[\u2212\ufe63\uff0d]|(?<![\w)}])[\u2010-\u2013](?=[\d.$\\])")
"""Minus signs, and dashes in the place of one."""
_COMPATIBLE = re.compile(r"[\uff01-\uff5e\U0001d400-\U0001d7ff]+")
_CHANGED = re.compile(
    r"\b(?:(?:or|and)\s+(?:more|less|fewer|greater|smaller|above|below|over|under|up|down|higher|lower"
    r"|an?|one|half|two|three|some|change)|or\s+so\s+(?:more|less|fewer)|(?:more|less|fewer|greater)\s+than"
    r"|at\s+(?:least|most)|not|never|anything\s+but|wrong|incorrect|false|factorial|plus|minus|remainder"
    r"|mod(?:ulo)?|twice|thrice|doubles?|triples?|quadruples?|reversed|backwards?|below|bce?"
    r"|half\s+(?:of\s+)?(?=\d)|(?:square|cube)(?:d|s|\s+root)?\s+of|times\s+(?:two|three))\b"
    r"|(?<![\\\w])(?:over|under|above)\s+(?=[\d$\\])"
    r"|\d[\s}]*(?:\\text\w*\s*\{)?\s*(?:squared|cubed|(?:doubl|tripl|quadrupl|halv)ed)\b"
)
"""Words after a number that make it another one, which no unit does."""
_CHANGED_NUMBER = re.compile(
    r"\d(?:\s|[}$~-])*(?:\\text\w*\s*\{\s*)?(?:(?:or|and)\s+(?:more|less|fewer|a\s+(?:half|third|quarter))"
    r"|factorial|squared|cubed|(?:doubl|tripl|quadrupl|halv)ed|plus\s|minus\s|less\s+\d|mod\b)"
)
_CHANGED_LAST_NUMBER = re.compile(
    r"\d(?:\s|[}$~()-])*(?:\\text\w*\s*\{\s*)?(?:and\s+(?:some|change)|or\s+so\s+(?:more|less|fewer)"
    r"|(?:more|less|fewer|greater)\s+than|twice|thrice|doubles?|triples?|reversed|backwards?|bce?"
    r"|(?:degrees\s+)?below\s+zero|(?:(?:is|are|was)\s+)?(?:not|wrong|incorrect|never|false))\b[^\d]*$"
    r"|(?:\b(?:not|never|anything\s+but|twice|double|triple|half(?:\s+of)?|(?:square|cube)(?:\s+root)?\s+of)"
    r"|n['\u2019]t(?:\s+be)?)\s+(?:\\?\$|\\\()?\s*-?[\d.,]+[^\d]*$",
    re.IGNORECASE,
)
_BOUND = re.compile(
    r"^\W*(?:at\s+(?:least|most)|(?:more|less|fewer|greater)\s+than|over|under|above|below|between|no|>|<)\s*"
    r"(?:\\?\$|\\\()?\s*-?[\d.]",
    re.IGNORECASE,
)
_SIGN_WORD = re.compile(
    r"(?<![\d)}]\s)(?:\\text\w*\s*\{\s*|\b)(?:minus|negative)\s*\}?\s+(?=(?:\\?\$)?-?[\d.]|\\(?:frac|sqrt|pi))",
    re.IGNORECASE,
)
_RANGE = re.compile(r"(\d+(?:\.\d+)?)\s*[-\u2013]+\s*(\d+(?:\.\d+)?)")
_BEFORE_YEAR = re.compile(r"^\s*(?:in\s+)?(?:the\s+)?(?:year\s+)?(?=\d{4}\b)", re.IGNORECASE)
_SAME_WORDS = {
    **dict.fromkeys(("no solution", "no solutions", "no real solutions"), "\\emptyset"),
    **dict.fromkeys(
        ("all real numbers", "all reals", "the set of all real numbers"), "\\mathbb{R}"
    ),
}
_WHOLE_FONT = re.compile(r"^\s*\\text\w*\s*\{([A-Za-z\s-]*)\}\s*$")
_OUT_OF = re.compile(r"^\s*(\d+)\s+(?:out\s+of|in)\s+(\d+)\s*\.?\s*$")
_FOREIGN_NOUN = re.compile(
    r"^\s*(-?\d[\d.,]*)\s+(?=[^\x00-\x7f]|[a-z]+[^\x00-\x7f])[^\W\d_]{2,}\.?\s*$", re.IGNORECASE
)
_PLAIN_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)")
_REPEATING_IN_BRACKETS = re.compile(r"(\d*\.\d*)\((\d+)\)")
_OTHER_DIGITS = re.compile(r"(?![0-9])\d")
_BARE = re.compile(
    r"(?<![\\A-Za-z])(?!(?:log|ln|sin|cos|tan|sqrt|and|or)\b)[A-Za-z]{2,}|=.*=|..=|:"
)
_LAYOUT = re.compile(r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[,;:! ]|[$*~\s]|\\q?quad\b")
_LONG_NAME = re.compile(r"\\(?:([lgn]e)q|[dtc](frac))(?![a-zA-Z])")
_ARTICLE = re.compile(r"^\s*(?:an?|the)\s+(?=[A-Za-z]{3})")
_CONJUNCTION = re.compile(r"\s*,?(?<![A-Za-z\\])\s*(?:and|or)(?![A-Za-z])\s*")
_CHOICE = re.compile(r"\(([a-z])\)")
_RATIO_OR_TIME = re.compile(r"\d+(?::\d+)+|\d+[ap]\.?m|\d{4}-\d{1,2}-\d{1,2}")
_RATIO = re.compile(r"([^:]*\d\}?\s*):([^:]*\d[^:]*)")
_RATIO_WORD = re.compile(r"(?<=\d)\s*to\s*(?=\d)")
_WORDS = re.compile(
    r"\\text\w*\s*\{[^{}]*[A-Za-z]{2}|(?<![\\A-Za-z{])(?:[A-Z][a-z]{2,}|[a-z]{4,})(?![A-Za-z}])"
)
_EMPHASIS = re.compile(
    r"(?<![\w*])(\*{1,3})(?=[^\s*])(.*?[^\s*\\])\1(?![\w*])"
    r"|(?<![\w`])(`{1,3})([^`]+)\3(?![\w`])|(?<!\w)(__)(?=\S)(.*?\S)\5(?!\w)"
)
_APPROXIMATELY = re.compile(
    r"(?:\\(?:approx|simeq|thickapprox|cong)(?![A-Za-z])|\N{ALMOST EQUAL TO}"
    r"|(?<![A-Za-z])(?:\\text\w*\s*\{\s*)?(?:about|approximately|around|roughly)\s*\}?)\s*(?=[-+.\d\\$])"
)
_EQUALITY = re.compile(
    r"\s*(=|\\(?:approx|simeq|thickapprox|cong)(?![A-Za-z])|\N{ALMOST EQUAL TO})\s*"
)
_NUMERIC_COMMAND = re.compile(r"\\(?:[dt]?frac|sqrt|times|cdot|div|pi|left|right)(?![A-Za-z])")
_NO_NUMBER = re.compile(r"[A-Za-z\\<>,;:%]")
_PLAIN_NUMBER = re.compile(
    r"([-+]?(?:\d+\.?\d*|\.\d+))(?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{?\s*([-+]?\d{1,4})\s*\}?)?"
)
_LETTERS = re.compile(r"\s*[A-Z]{2,}\s*")
_DELIMITER = re.compile(r"\\?\$|\\[()\[\]]")
_DOTTED_DIGITS = re.compile(r"\\dot\{?(\d)\}?(?:(\d*)\\dot\{?(\d)\}?)?")
_ELLIPSIS = re.compile(r"(\d*\.\d*?)(\d+?)\2+(?:\\[lc]?dots|\.\.\.|…)")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\[,:;! ])\s*(?=\d{3}(?!\d))")
_POWER_OF_TEN = re.compile(r"(\d)[eE]([+-]?\d+)")
_LETTER_TIMES = re.compile(r"(\d)\s*x\s*10\s*\^")
_FUNCTION = re.compile(r"(?<![\\A-Za-z{])(ln|log|sin|cos|tan)(?=[\s(]*[\dA-Za-z\\])(?![A-Za-z]{2})")
_MIXED = re.compile(r"(\d)\s+(\d+)/(\d+)(?!\d)")
_ALL = re.compile(r"^\\text\w*\s*\{\s*all\b[^{}]*\}(?=.*(?:[<>]|\\[lg]e))")
_ORDINAL = re.compile(
    r"(?<=\d)\s*\^?\s*\{?\s*(?:\\(?:text|mathrm)\s*\{)?\s*(?:st|nd|rd|th)\s*\}*\s*$"
)
_BASE = re.compile(r"\d\w*_\{?(\d+)\}?")
_TIME = re.compile(r"\d+:\d+[ap]m")
_DOTTED = re.compile(r"(\d[ap])\.m$")
_ONE_SIGN = re.compile(r"(?<!\\)\{(\w)\}")
_OR = re.compile(r"\\text\w*\s*\{\s*(?:or|and)\s*\}")
_SAME_SIGN = {
    "\\!": "",
    "\\degree": "^\\circ",
    "\\varnothing": "\\emptyset",
    "\\backslash": "\\setminus",
    "\\langle": "(",
    "\\rangle": ")",
    "\\log_e": "\\ln",
    "\\log_{e}": "\\ln",
    "\\lg": "\\log_{10}",
    "\\pounds": "",
    "\\text{infinity}": "\\infty",
    "\\text{no solution}": "\\emptyset",
    "\\text{no solutions}": "\\emptyset",
    "\\text{all real numbers}": "\\mathbb{R}",
    "\\text{all reals}": "\\mathbb{R}",
}
_SPELLED_OTHERWISE = re.compile(
    "|".join(re.escape(sign) + r"(?![A-Za-z])" * sign[-1].isalpha() for sign in _SAME_SIGN)
)
_UNICODE = str.maketrans(
    {
        "\N{EURO SIGN}": "",
        "\N{POUND SIGN}": "",
        "\N{INDIAN RUPEE SIGN}": "",
        "\N{YEN SIGN}": "",
        "\N{DEGREE SIGN}": "^\\circ ",
        "\N{EMPTY SET}": "\\emptyset ",
        "\N{INFINITY}": "\\infty ",
        "\N{GREEK SMALL LETTER PI}": "\\pi ",
        "\N{GREEK SMALL LETTER THETA}": "\\theta ",
        "\N{SQUARE ROOT}": "\\sqrt ",
        "\N{PLUS-MINUS SIGN}": "\\pm ",
        "\N{MULTIPLICATION SIGN}": "\\times ",
        "\N{MIDDLE DOT}": "\\cdot ",
        "\N{DIVISION SIGN}": "\\div ",
        "\N{LESS-THAN OR EQUAL TO}": "\\le ",
        "\N{GREATER-THAN OR EQUAL TO}": "\\ge ",
        "\N{NOT EQUAL TO}": "\\ne ",
        "\N{UNION}": "\\cup ",
        "\N{INTERSECTION}": "\\cap ",
        "\N{ELEMENT OF}": "\\in ",
        "\N{DOUBLE-STRUCK CAPITAL R}": "\\mathbb{R}",
    }
)
_LETTER = re.compile(
    r"\\(?:mathbf|boldsymbol|bm|vec|hat)\s*(?:\{\s*([A-Za-z])\s*\}|\s([A-Za-z])\b)"
    r"|\\mathrm\s*\{\s*([ei])\s*\}"
)
_NUMBER_SET = re.compile(r"\\mathbb\s*([A-Z])\b")
_DERIVATIVE = re.compile(
    r"^\s*(?:\\[dt]?frac\s*\{(?:d|\\partial)\s*\w?\}\s*\{(?:d|\\partial)\s*\w\}|d\w/d\w|\w')\s*=(?!=)"
)
_SET_OF = re.compile(
    r"\\\{\s*\w\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid|\||:|\\colon)(?![a-z])(.*[<>=].*|.*\\[lgn]e.*)\\\}"
)
_UNIT_IN_TEXT = re.compile(
    r"(?<=.)(?:[\s~]|\\[,;:! ])*"
    r"(?:\\(?:text\w*|mathrm|mbox)\s*\{[^{}]*\}(?:\^\{?-?\d\}?)?\s*(?:/|\\cdot)?\s*)+(?=,|$)"
)
_SHORT = (
    r"(?:sq\.?|cu\.?)\s+(?:ft|in|mi|yd|km|cm|mm|m)|cm|mm|km|dm|ft|in|yd|mi|kg|mg|gm|lb|oz|ml|mph|hr|min|sec|kmh"
    r"|[kMG]?Hz|[kKMGT]B|[kM]?Wh?|k?Pa|k?cal|[cd]l|cc|mol|dB|rpm|psi|k[JNV]|m[AVW]|[mn]s|nm"
)
_PLAIN = r"[^A-Za-z\\]*"
_QUANTITY = re.compile(
    rf"({_PLAIN}(?:\\(?:[dt]?frac|sqrt|pi|times|cdot)(?![A-Za-z]){_PLAIN})*(?<![\s^_]))"
    rf"(?:\s*(?:{_SHORT})|\s+(?:[mgshlLJNWVK]|[A-Za-z]{{3,}}))s?\.?"
    rf"(?:\s+(?:per|{_SHORT}|[A-Za-z]{{3,}})|/\s*[a-z]+)*(?:\^\{{?\d\}}?)?\s*"
)
"""Number with a unit in letters."""
_CONDITION_WORD = r"(?:for|where|when|with|if|otherwise|else)"
_CONDITION = re.compile(
    rf"[\s,;]*(?:\\(?:q?quad|[,;: ])\s*)*(?:\\text\w*\s*\{{\s*{_CONDITION_WORD}\b"
    rf"|(?<![A-Za-z\\{{]){_CONDITION_WORD}\b|(?<=,)\s*(?:\\[,;: ]|\\q?quad)?\s*\w\s*\\in\s*\\mathbb)(.*)$",
    re.DOTALL,
)
_LETTER_AND_VALUE = re.compile(
    r"\s*\(?([A-J])(?:\)|[.:](?!\d))(?:[\s~]|\\[,;:! ]|\\q?quad)*(?![\s,;]|and\b|or\b)(\S.*)"
)
_OPTION = re.compile(r"^\s*(?:option|choice)\s+(?=\(?[A-J]\b)", re.IGNORECASE)
_ONE_CHOICE = re.compile(r"\s*\(?([A-J])\)?\.?\s*")
_MAGNITUDE = re.compile(
    r"(?<=\d)(?:[\s~]|\\[,;:! ])*(\\text\w*\s*\{\s*)?(thousand|million|billion|trillion)s?\b"
)
_EXPONENT = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_TEMPERATURE = re.compile(
    r"(?<=\d)(?:[\s~$]|\\[,;:! ])*(?:\N{DEGREE SIGN}|\^\s*\{?\s*\\circ\s*\}?)\s*"
    r"(?:\\(?:text\w*|mathrm)\s*\{\s*)?[CF]\}?(?![A-Za-z])"
)
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*\{?\s*\\circ\s*\}?")


def same_text(expected: str, answer: str) -> bool:
    """Returns True if two answers have the same text; one of two times may omit ``am`` or ``pm``."""
    shorter, longer = sorted((as_text(expected), as_text(answer)), key=len)
    return shorter == longer or (bool(_TIME.fullmatch(longer)) and longer[:-2] == shorter)


def normalized(text: str) -> str:
    """Returns a text with ASCII for compatible signs: raised digits, fractions, dashes, wide letters.

    Styles that no reader sees as part of an answer, such as colors, are removed.
    """
    text = _COMPATIBLE.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)
    text = _RAISED_TEXT.sub(_unraised, _DASH.sub("-", text))
    text = "".join(map(_unfractioned, text))
    text = _OTHER_DIGITS.sub(lambda sign: str(unicodedata.digit(sign[0])), text)
    text = _REPEATING_IN_BRACKETS.sub(r"\1\\overline{\2}", _PLAIN_ROOT.sub(r"\\sqrt{\1}", text))
    return _UNDERLINED.sub("", _INVISIBLE.sub("", text))


def _unraised(signs: re.Match[str]) -> str:
    mark = "^" if signs[0][0] in "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ" else "_"
    plain = signs[0].translate(_RAISED)
    return f"{mark}{plain}" if len(plain) == 1 else f"{mark}{{{plain}}}"


def _unfractioned(sign: str) -> str:
    if unicodedata.category(sign) != "No" or "\N{FRACTION SLASH}" not in unicodedata.normalize(
        "NFKC", sign
    ):
        return sign
    above, below = unicodedata.normalize("NFKC", sign).split("\N{FRACTION SLASH}")
    return f"\\frac{{{above}}}{{{below}}}"


def spelled(answer: str) -> str:
    """Returns an answer in words as number, set or choice, if it is one; others as is."""
    name = _without_fonts(answer).strip(" .$").casefold()
    if name in _SAME_WORDS:
        return _SAME_WORDS[name]
    answer = _WHOLE_FONT.sub(r"\1", answer)
    answer = _OUT_OF.sub(r"\\frac{\1}{\2}", _FOREIGN_NOUN.sub(r"\1", answer))
    answer = _BEFORE_YEAR.sub("", _OPTION.sub("", answer))
    return per_cents(with_digits(_SIGN_WORD.sub("-", answer)))


def is_bare(answer: str) -> bool:
    """Returns True if a text is an expression without words, equations and labels."""
    return not _BARE.search(_without_fonts(answer))


def is_bound(answer: str) -> bool:
    """Returns True if an answer begins with a bound, such as ``at least 72``."""
    return bool(_BOUND.match(answer))


def is_changed(answer: str) -> bool:
    """Returns True if words change a number: ``72 or more``, ``5 and a half``, ``5 squared``."""
    return bool(_CHANGED.search(answer))


def has_changed_number(answer: str) -> bool:
    """Returns True if such words directly follow a number, which may be part of a sentence."""
    return bool(_CHANGED_NUMBER.search(answer))


def has_changed_last_number(line: str) -> bool:
    """Returns True if words next to the last number of a line deny or change it."""
    return bool(_CHANGED_LAST_NUMBER.search(line))


def as_text(answer: str) -> str:
    """Returns an answer without fonts, spacing and case, for comparison as text."""
    if spelled := number_of_words(_without_fonts(answer).strip(" .$")):
        return spelled
    answer = _SPACED_THOUSANDS.sub(lambda number: _SPACED_DIGITS.sub("", number[0]), answer)
    answer = _SPACED_DIGITS.sub("\N{OPEN BOX}", answer)
    answer = _RANGE.sub(r"\1-\2", answer)
    plain = _CONJUNCTION.sub(",", _ARTICLE.sub("", _spelled_ratio(_without_fonts(answer))))
    text = _LONG_NAME.sub(r"\\\1\2", _LAYOUT.sub("", plain)).casefold()
    text = text if text.endswith("...") else text.rstrip(".")
    return _CHOICE.sub(r"\1", _DOTTED.sub(r"\1m", _ONE_SIGN.sub(r"\1", text)))


def without_emphasis(text: str) -> str:
    """Removes the asterisks, underscores and backticks of Markdown around words and numbers."""
    previous = None
    while previous != text:
        previous, text = text, _EMPHASIS.sub(r"\2\4\6", text)
    return text


def plain_number(answer: str) -> Fraction | None:
    r"""Returns the exact value of a decimal, also with ``\times 10^{n}``; None for any other answer."""
    match = _PLAIN_NUMBER.fullmatch(without_indian_groups(as_latex(answer).strip()))
    return match and Fraction(match[1]) * Fraction(10) ** int(match[2] or 0)


def is_text(answer: str) -> bool:
    """Returns True if an answer is words, letters, a ratio or a time, which have no value."""
    if _RATIO_OR_TIME.match(as_text(answer)) or _LETTERS.fullmatch(_without_fonts(answer)):
        return True
    if _RANGE.fullmatch(_without_fonts(answer).strip(" $")):
        return True
    is_number = re.match(r"[-.\d]|\\[dt]?frac|\\sqrt", as_text(answer))
    return not is_number and bool(_WORDS.search(_OR.sub(",", as_latex(answer))))


def has_words(answer: str) -> bool:
    return bool(_WORDS.search(_OR.sub(",", answer)))


def base(answer: str) -> str | None:
    """Returns the base of a number such as ``123_5``, or None."""
    match = _BASE.fullmatch(as_text(answer))
    return match and match[1]


def choice(answer: str) -> tuple[str, str]:
    """Splits a multiple-choice answer such as ``(B) 15`` into letter and value; either may be empty."""
    plain = _OPTION.sub("", _without_fonts(_DELIMITER.sub("", answer)))
    if letter := _ONE_CHOICE.fullmatch(plain):
        return letter[1], ""
    match = _LETTER_AND_VALUE.fullmatch(plain)
    several = match is None or _LETTER_AND_VALUE.search(match[2])
    return ("", "") if match is None or several else (match[1], match[2])


def ratio_as_fraction(answer: str) -> str | None:
    r"""Converts ``3:2`` to ``\frac{3}{2}``; returns None if the answer is not a ratio."""
    match = _RATIO.fullmatch(_spelled_ratio(_without_fonts(_DELIMITER.sub(" ", answer))))
    return match and f"\\frac{{{match[1]}}}{{{match[2]}}}"


def _spelled_ratio(answer: str) -> str:
    """Converts ``3 to 2`` to ``3:2``."""
    return _RATIO_WORD.sub(":", answer)


def without_condition(answer: str) -> str:
    r"""Removes the condition of ``n, n \in \mathbb{Z}`` or ``n for n > 0``; keeps piecewise answers."""
    match = _CONDITION.search(answer)
    if not match or "\\begin" in answer or re.search(rf"\b{_CONDITION_WORD}\b", match[1]):
        return answer
    value = answer[: match.start()]
    return value if value.strip() and not is_text(value) else answer


def without_per_cent(answer: str) -> str:
    """Removes percent signs."""
    return answer.replace("\\%", "").replace("%", "")


def in_radians(answer: str) -> str:
    r"""Converts ``30^\circ`` to ``\frac{30\pi}{180}``."""
    return _DEGREES.sub(r"{\\left(\\frac{\1\\pi}{180}\\right)}", answer.translate(_UNICODE))


def has_magnitude(answer: str) -> bool:
    """Returns True if ``million`` or a similar word follows a number."""
    return bool(_MAGNITUDE.search(answer))


def with_magnitude(answer: str) -> str:
    r"""Converts ``5 million`` to ``5\times 10^{6}``."""
    return _MAGNITUDE.sub(
        lambda match: f"\\times 10^{{{_EXPONENT[match[2]]}}}{match[1] or ''}", answer
    )


def numbers_of_chain(answer: str) -> list[tuple[str, str]]:
    r"""Splits ``\frac{1}{3} \approx 0.33`` at its signs of equality, if all parts are numbers.

    Returns:
        Each part after the sign before it, which is empty for ``=`` and the first part; the entire answer
        if it is no such chain.
    """
    pieces = _EQUALITY.split(_DELIMITER.sub(" ", answer))
    numbers = pieces[::2]
    if not all(re.search(r"\d", number) for number in numbers) or any(
        _NO_NUMBER.search(_NUMERIC_COMMAND.sub("", number)) for number in numbers
    ):
        return [("", answer)]
    signs = ["" if sign == "=" else sign for sign in ["=", *pieces[1::2]]]
    return list(zip(signs, numbers, strict=True))


def alternatives(answer: str) -> list[str]:
    """Splits an answer at each ``or``."""
    return re.split(
        r"\\text\w*\s*\{\s*or\s*\}|(?<![A-Za-z\\])or(?![A-Za-z])|\\lor\b|\\vee\b", answer
    )


def as_latex(answer: str) -> str:
    """Converts an answer to LaTeX that ``math-verify`` can parse inside a box."""
    tidy = _DOTTED_DIGITS.sub(
        r"\\overline{\1\2\3}", _TEMPERATURE.sub("", answer).translate(_UNICODE)
    )
    tidy = _REPEATING.sub(_as_fraction, _ELLIPSIS.sub(r"\1\\overline{\2}", tidy))
    tidy = _THOUSANDS.sub(",", " ".join(_DELIMITER.sub(" ", tidy).split()))
    tidy = _APPROXIMATELY.sub("=", tidy).strip().removeprefix("=").strip()
    tidy = _NUMBER_SET.sub(r"\\mathbb{\1}", _LETTER.sub(r" \1\2\3", tidy))
    tidy = _SPELLED_OTHERWISE.sub(lambda match: _SAME_SIGN[match[0]], tidy)
    tidy = _FUNCTION.sub(r"\\\1", _LETTER_TIMES.sub(r"\1\\times 10^", tidy))
    tidy = _POWER_OF_TEN.sub(r"\1\\times 10^{\2}", _ORDINAL.sub("", tidy))
    tidy = _MIXED.sub(r"\1\\frac{\2}{\3}", _ALL.sub("", tidy))
    if text_match := re.fullmatch(r"\\text\w*\s*\{([^{}]*\d[^{}]*)\}", tidy):
        tidy = text_match[1]
    tidy = _UNIT_IN_TEXT.sub("", tidy)
    if quantity := _QUANTITY.fullmatch(tidy):
        tidy = quantity[1]
    if described := _SET_OF.fullmatch(tidy):
        tidy = described[1]
    return number_of_words(tidy) or _DERIVATIVE.sub("D=", tidy)


def rewritten(latex: str) -> list[str]:
    r"""Returns alternatives for unparsable LaTeX: both signs of ``\pm``, or an equation's right side."""
    if "," in latex:
        return []
    if "\\pm" in latex:
        negative = latex.replace("\\pm", "-").replace("\\mp", "+")
        return [latex.replace("\\pm", "+").replace("\\mp", "-") + "," + negative]
    name, _, value = latex.rpartition("=")
    return [value] if value != latex and not re.search(r"[<>]|\\(?:[lgn]e|or)", name) else []


def _without_fonts(answer: str) -> str:
    previous = None
    while previous != answer:
        previous, answer = answer, _FONT.sub(r"\1", answer)
    return answer


def _as_fraction(decimal: re.Match[str]) -> str:
    r"""Converts ``0.1\overline{6}`` to ``\frac{15}{90}``."""
    integer, fixed, repeated = decimal.groups()
    value = int(integer + fixed + repeated) - int((integer + fixed) or 0)
    return f"\\frac{{{value}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"
