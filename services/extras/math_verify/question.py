r"""The form of answer that a question asks for: what ``72\%``, ``1:4`` and ``72 more`` mean there. Pure.

An answer 72 does not say whether the question asks for a number or for per cents, and ``72 more`` is an
answer only to "how many more". Without a question, these are other answers than 72.
"""

import re
from typing import Final

_PER_CENT: Final = re.compile(r"%|per\s?cent|interest\s+rate", re.IGNORECASE)
_RATIO: Final = re.compile(
    r"\bratios?\b|\bproportions?\b|(?<![\d:])\d+\s*:\s*\d+(?![\d:])", re.IGNORECASE
)
_DIFFERENCE: Final = re.compile(r"\bdifferences?\b|\bdiffers?\b|\bcompared?\b", re.IGNORECASE)
_AFTER_NUMBER: Final = r"(?<=\d)(?:\s|[}$~]|\\[,;:! ]|\\\))*(?:\\text\w*\s*\{\s*)?\s*"
_WORDS: Final = (
    r"more|less|fewer|too\s+(?:many|few|much|little)|short|higher|lower|above|below|left\s+over"
)
_COMPARISON: Final = re.compile(
    rf"(?P<before>{_AFTER_NUMBER}(?:[A-Za-z]+\s+)?)(?P<word>{_WORDS})\b", re.IGNORECASE
)
_BARE_COMPARISON: Final = re.compile(
    r"^(?:\W|\\text\w*)*(?:\d[\d.,]*|\\frac\s*\{\d+\}\s*\{\d+\})"
    r"(?:\s|[}$~]|\\[,;:! ]|\\\))*(?:\\text\w*\s*\{\s*)?"
    r"\s*(?:[A-Za-z]+\s+){0,2}?(?:more|less|fewer|too\s+(?:many|few|much|little)|short|higher|lower|above|below)\b",
    re.IGNORECASE,
)
_FRACTION: Final = re.compile(
    r"\$?(?:\\[dt]?frac\s*\{((?:[^{}]|\{[^{}]*\})+)\}\s*\{((?:[^{}]|\{[^{}]*\})+)\}|\\[dt]?frac\s*(\d)\s*(\d)"
    r"|(\d+)\s*/\s*(\d+)|(\d+))\$?"
)


def asks_for_per_cent(question: str) -> bool:
    """Returns True if a number in per cents may answer a question."""
    return bool(_PER_CENT.search(question))


def as_ratio(question: str, answer: str) -> str | None:
    """Returns ``3:4`` for the answer ``3/4`` of a question about a ratio, ``3:1`` for 3; else None."""
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
