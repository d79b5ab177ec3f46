"""Dates in answers, such as ``May 4``, ``the 4th of May`` and ``May 4, 2024``. Pure."""

import re
from typing import Final

from services.extras.math_verify.words import MONTHS, WEEKDAYS

_MONTH: Final = rf"(?P<month>{MONTHS}|(?:jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec)\b\.?)"
_DAY: Final = r"(?P<day>\d{1,2})(?:\s*\^?\{?(?:st|nd|rd|th)\b\}?)?"
_YEAR: Final = r"(?:,?\s+(?P<year>\d{4})(?!\d))?"
_FORMS: Final = tuple(
    re.compile(rf"(?i)(?<![\w.])(?:the\s+)?{form}(?![\w/:]|[.,]\d|\s*BC)")
    for form in (rf"{_MONTH}\s+(?:the\s+)?{_DAY}{_YEAR}", rf"{_DAY}(?:\s+of)?\s+{_MONTH}{_YEAR}")
)
_WEEKDAY: Final = re.compile(rf"(?i)\b{WEEKDAYS},?\s+")
_CHANGES: Final = re.compile(
    r"(?i)\b(?:before|after|until|since|from|not|never|or|than|by)\s+(?:on\s+)?$"
)
_DENIES: Final = re.compile(r"(?i)\b(?:not|never|or)\b|n['\u2019]t\b")

Date = tuple[int, int, int | None]
"""Month, day, and year if it is said."""


def date_of(text: str) -> Date | None:
    """Returns the date that a text is, perhaps with its day of the week; None for any other text."""
    plain = _WEEKDAY.sub("", re.sub(r"\\text\w*\s*\{([^{}]*)\}|[$~]", r" \1 ", text)).strip(" .")
    return next((_date(match) for form in _FORMS if (match := form.fullmatch(plain))), None)


def only_date(line: str) -> Date | None:
    """Returns the date in a line that has one and says nothing that changes it; None for other lines."""
    matches = [match for form in _FORMS for match in form.finditer(line)]
    if len(matches) != 1 or _DENIES.search(line) or _CHANGES.search(line[: matches[0].start()]):
        return None
    return _date(matches[0])


def _date(match: re.Match[str]) -> Date:
    names = [name[:3] for name in MONTHS.split("|")]
    month = names.index(match["month"][:3].casefold()) + 1
    return month, int(match["day"]), int(match["year"]) if match["year"] else None
