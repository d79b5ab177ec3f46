r"""Words and patterns that several modules share: fonts, auxiliary verbs, months, weekdays. Pure."""

import re
from typing import Final

AUXILIARY_VERBS: Final = (
    r"do|does|did|is|are|was|were|will|would|can|could|should|has|have|had|must"
)
MONTHS: Final = (
    "january|february|march|april|may|june|july|august|september|october|november|december"
)
WEEKDAYS: Final = "(?:mon|tues|wednes|thurs|fri|satur|sun)day"
FONT: Final = r"\\(?:text(?!color)\w*|math(?:bf|rm|it|sf)|mbox|boldsymbol|operatorname)\s*\{\s*"
"""Start of a text in a font."""
_TEXT_IN_FONT: Final = re.compile(rf"{FONT}([^{{}}]*)\}}")


def without_fonts(text: str, before: str = "", after: str = "") -> str:
    """Returns a text without the commands of its fonts, of which several may be nested.

    Args:
        before: Replaces a command and its opening brace.
        after: Replaces its closing brace.
    """
    previous = None
    while previous != text:
        previous, text = text, _TEXT_IN_FONT.sub(rf"{before}\1{after}", text)
    return text


def table(*lines: str) -> dict[str, str]:
    """Returns the keys and values of ``"people:person men:man"``, which white space and colons separate."""
    return dict(re.findall(r"(\S+?):(\S*)", " ".join(lines)))
