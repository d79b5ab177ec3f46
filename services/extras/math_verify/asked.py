r"""Finds what a question asks for: a count of a noun, money, per cents, a quantity, a variable. Pure.

"How many pages does Tom read?" asks for pages, so ``36 books`` and ``\$36`` are answers to other questions.
What a question does not say, such as the noun of "How many are left?", decides nothing.
"""

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final

from services.extras.math_verify import question, units
from services.extras.math_verify.words import AUXILIARY_VERBS, table

GROUPS: Final = frozenset(
    (
        *("pair", "couple", "set", "box", "pack", "packet", "package", "bag", "group", "team"),
        *("case", "crate", "roll", "bundle", "dozen", "gross", "score", "row", "stack", "fold"),
        *("hundred", "dime", "nickel", "penny", "quarter", "coin", "bill", "time"),
    )
)
"""Nouns that stand for several or a part of what a question counts, so that they change a number."""
GENERAL: Final = frozenset(("person", "piece", "item", "thing", "individual"))
"""Nouns that may stand for any other one."""
_IRREGULAR: Final[Mapping[str, str]] = table(
    "people:person men:man women:woman children:child feet:foot teeth:tooth geese:goose",
    "mice:mouse wolves:wolf leaves:leaf shelves:shelf loaves:loaf knives:knife halves:half",
    "dice:die pennies:penny",
)
_HOW_MANY: Final = re.compile(
    r"(?i)\b(?:how\s+many|(?:total\s+)?number\s+of)\b(?P<phrase>[^?.;:,()]*)"
)
_VERBS: Final = (
    rf"{AUXILIARY_VERBS}|shall|may|might|be|been|being"
    r"|left|remain\w*|need\w*|makes?|[a-z]+n['\u2019]t"
)
FUNCTION_WORDS: Final = (
    r"if|in|on|at|for|from|with|without|by|to|into|onto|per|after|before|during|over|under|between|among|across"
    r"|out|when|while|that|which|who|whom|whose|what|than|as|altogether|together|each|every|both|all|he|she|they"
    r"|it|you|we|i|his|her|their|your|my|this|there|these|those|not|still|now|then"
)
_PROPER_NAME: Final = r"(?!Of\b)[A-Z][a-z]*(?:'s|s')?"
_END_OF_NOUN: Final = re.compile(rf"\b(?:{_VERBS}|{FUNCTION_WORDS}|{_PROPER_NAME})\b")
"""Word after a noun phrase."""
_END_OF_NAMES: Final = re.compile(rf"\b(?:{_VERBS}|{FUNCTION_WORDS})\b")
"""Word after a noun phrase that may have names in it, such as ``Scottish unicorns``."""
_NO_QUALIFIER: Final = re.compile(
    rf"(?i)(?:{_VERBS}|{FUNCTION_WORDS}|how|many|much|more|fewer|less|some|any|no|other|another|total|number|of|and|or"
    r"|an?|the|one|two|three|four|five|six|seven|eight|nine|ten|twelve|dozen|hundred|thousand|million|half|only"
    r"|several|few|same|whole|full|new|extra|additional|first|second|last|next)"
)
_PAIR_OF_QUALIFIERS: Final = re.compile(
    r"(?i)\b([a-z]{3,})(?:\s+ones)?(?:,\s*|\s+(?:and|or|but|plus)\s+)(?:\d+\s+|the\s+|[a-z]+\s+as\s+many\s+)?([a-z]{3,})\s+([a-z]{3,})"
)
_STATE: Final = re.compile(
    r"(?i)\b(?:is|are|was|were)\s+(?P<negation>not\s+)?(?:still\s+|now\s+|already\s+)?(?P<state>[a-z]{3,})\b"
)
_NO_NOUN: Final = frozenset(
    (
        *("more", "total", "fewer", "less", "full", "whole", "additional", "extra", "other"),
        *("combined", "consecutive", "new", "different", "many", "much", "such", "of", "the"),
        *("a", "an", "and", "or", "one", "two", "three", "them", "these", "those", "it", "us"),
        "you",
    )
)
_MONEY_NOUNS: Final = frozenset(
    ("dollar", "cent", "euro", "money", "peso", "yen", "rupee", "buck", "usd", "penny")
)
_KINDS: Final = (
    (
        re.compile(
            r"(?i)\bhow\s+(?:old|long|soon|much\s+(?:time|longer|older|younger))\b|\bat\s+what\s+age\b"
        ),
        ("time", "months", "length"),
    ),
    (re.compile(r"(?i)\bhow\s+(?:far|tall|high|wide|deep|thick)\b"), ("length",)),
    (
        re.compile(r"(?i)\bhow\s+(?:heavy|much\s+(?:do|does|did|will)\s[^?.]*\bweigh)\b"),
        ("mass", "force"),
    ),
)
_EXTENT: Final = re.compile(
    r"(?i)\b(?:what\s+(?:is|was|will\s+be|are)|find|calculate|compute|determine)\s+(?:the\s+)?(?:\w+\s+){0,2}?"
    r"(?P<noun>area|volume|perimeter|circumference|diameter|radius|distance|length|width|height|depth)\b"
)
_EXTENTS: Final[Mapping[str, int]] = {"area": 2, "volume": 3}
_WORD: Final = re.compile(r"[A-Za-z]+(?:['\u2019][A-Za-z]+)?")
_END_OF_TARGET: Final = (
    r"if|of\s+(?:a(?!\s*(?:[^\sA-Za-z]|$|(?:[A-Za-z]|if|and|or|in|for|when|where|given|such|so|with|that)\b))"
    r"|an|the|this|that)|when|where|with|given|such|so\s+that|for\s+which|satisf\w+"
    r"|in\s+terms"
)
_TARGET: Final = re.compile(
    r"\b(?:find|solve\s+for|compute|calculate|determine|evaluate|value\s+of|what\s+(?:is|are|was)"
    r"|what['\u2019]s)\b"
    rf"(?P<phrase>.*?)(?=\b(?:{_END_OF_TARGET})\b|[,;?:]|\.(?:\s|$)|$)",
    re.IGNORECASE | re.DOTALL,
)
_EXPRESSION: Final = re.compile(
    r"(?!.*=)(?=.*[+\-*/^]|\d+[A-Za-z]|[A-Za-z]\d)(?:[^A-Za-z]|(?<![A-Za-z])[A-Za-z](?![A-Za-z]{2}))+"
)
NAME: Final = re.compile(
    r"(?<![A-Za-z\\'\u2019])(?:[A-Z]{2,3}|[A-Za-z])(?:_\{?\w+\}?)?(?:\([^()]*\))?(?![A-Za-z'\u2019(_])"
)
_MAX_NOUN_WORDS: Final = 4
_ARTICLES: Final = frozenset({"a", "A", "I"})


@dataclass(frozen=True, slots=True)
class Asked:
    """Kind of answer that a question asks for; all fields are empty if the question does not show it."""

    nouns: frozenset[str] = frozenset()
    """Stems of the words of "How many duck eggs?"."""
    is_money: bool = False
    is_per_cent: bool = False
    unit: units.Unit | None = None
    dimensions: frozenset[tuple[tuple[str, int], ...]] = frozenset()
    """Dimensions of the answers to "How long?" and "What is the area?"."""

    @property
    def is_quantity(self) -> bool:
        """True if the answer is an amount with a unit or in money, or a number of per cents."""
        return bool(self.is_money or self.is_per_cent or self.unit or self.dimensions)

    @property
    def is_count(self) -> bool:
        """True if the answer is a number of things that the question names, and nothing else is asked."""
        return bool(self.nouns) and not self.is_quantity


@lru_cache(maxsize=64)
def asked_by(prompt: str) -> Asked:
    """Returns what a question asks for."""
    text = question.asked(prompt)
    phrases = _counted_phrases(text)
    is_money = any(_is_money(words) for words in phrases)
    nouns = frozenset(
        stem(word) for words in phrases for word in words if word.casefold() not in _NO_NOUN
    )
    return Asked(
        nouns=frozenset() if is_money else nouns,
        is_money=question.asks_for_money(prompt) or is_money,
        is_per_cent=question.asks_for_per_cent(prompt),
        unit=question.asked_unit(prompt),
        dimensions=frozenset(
            ((name, 1),) for pattern, names in _KINDS if pattern.search(text) for name in names
        )
        | {
            (("length", _EXTENTS.get(match["noun"].casefold(), 1)),)
            for match in _EXTENT.finditer(text)
        },
    )


def _counted_phrases(text: str) -> list[list[str]]:
    """Returns the words of each "how many ..." up to the verb."""
    phrases = []
    for match in _HOW_MANY.finditer(text):
        phrase = _END_OF_NOUN.split(match["phrase"], maxsplit=1)[0]
        if not any(map(is_plural, _WORD.findall(phrase))):
            phrase = _END_OF_NAMES.split(match["phrase"], maxsplit=1)[0]
        head, _, complement = phrase.partition(" of ")
        is_group = any(stem(word) in GROUPS for word in _WORD.findall(head))
        phrases.append(_WORD.findall(head if is_group else f"{head} {complement}"))
    return phrases


def _is_money(words: Sequence[str]) -> bool:
    """Returns True for ``dollars``, and False for ``25 dollar pens``."""
    plurals = [word for word in words if is_plural(word)] or [*words]
    return bool(plurals) and stem(plurals[-1]) in _MONEY_NOUNS


@lru_cache(maxsize=64)
def noun_words(text: str) -> tuple[str, ...]:
    """Returns the words of a noun phrase that a text begins with, up to a verb or a preposition."""
    head, _, complement = _END_OF_NOUN.split(text, maxsplit=1)[0].partition(" of ")
    words = _WORD.findall(head)[:_MAX_NOUN_WORDS]
    if GROUPS.isdisjoint(map(stem, words)):
        words += _WORD.findall(complement)[:_MAX_NOUN_WORDS]
    return tuple(word for word in words if word.casefold() not in _NO_NOUN)


def stem(word: str) -> str:
    """Returns the singular of a noun, in lower case."""
    word = re.sub(r"['\u2019]s?$", "", word.casefold())
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if word.endswith("ies") and len(word) > 4:
        return f"{word[:-3]}y"
    if re.search(r"(?:[sxz]|[cs]h|o)es$", word):
        return word[:-2]
    return word[:-1] if re.search(r"[^su]s$", word) and len(word) > 3 else word


def is_plural(word: str) -> bool:
    return word.casefold() in _IRREGULAR or stem(word) != word.casefold()


@lru_cache(maxsize=64)
def stems_of(text: str) -> frozenset[str]:
    """Returns the stems of all words of a text."""
    return frozenset(map(stem, _WORD.findall(text)))


def as_quantity(prompt: str, answer: str) -> str:
    """Returns an answer with the unit that a question asks for, or the only one that it has of that kind."""
    quantity = question.with_asked_unit(prompt, answer)
    if quantity != answer or question.asks_for_per_cent(prompt):
        return quantity
    return question.with_only_unit(prompt, answer, asked_by(prompt).dimensions)


@lru_cache(maxsize=64)
def _qualifiers(prompt: str) -> Mapping[str, frozenset[str]]:
    """Returns the words that stand before each noun of a question: ``red`` and ``blue`` of balls."""
    qualifiers: dict[str, set[str]] = {}
    words = re.findall(r"[A-Za-z]+|[^\sA-Za-z]", prompt)
    pairs = [*pairwise(words)]
    for match in _PAIR_OF_QUALIFIERS.finditer(prompt):
        pairs += [(match[1], match[3]), (match[2], match[3])]
    for word, noun in pairs:
        if (
            len(word) > 2
            and word.isalpha()
            and noun.isalpha()
            and not _NO_QUALIFIER.fullmatch(word)
        ):
            qualifiers.setdefault(stem(noun), set()).add(stem(word))
    return {noun: frozenset(words) for noun, words in qualifiers.items()}


def counts_another_part(prompt: str, text: str, expected_rest: str) -> bool:
    """Returns True for ``24 red balls`` if a question has red and blue balls and asks for balls.

    Args:
        text: What follows the number of a final answer.
        expected_rest: What follows the number of the expected answer, which allows its words.
    """
    words = [*map(stem, noun_words(text))]
    allowed = stems_of(question.asked(prompt)) | stems_of(expected_rest)
    for qualifier, noun in pairwise(words):
        others = _qualifiers(prompt).get(noun, frozenset())
        if qualifier in others - allowed and len(others) > 1:
            return True
    return _is_in_another_state(prompt, text, allowed)


def _is_in_another_state(prompt: str, text: str, allowed: Set[str]) -> bool:
    """Returns True for ``15 students are absent`` if a question asks how many students are present."""
    asked_states = [*_STATE.finditer(question.asked(prompt))]
    state = _STATE.search(text)
    if not asked_states or state is None:
        return False
    asked_state = asked_states[-1]
    if state["state"].casefold() == asked_state["state"].casefold():
        return bool(state["negation"]) != bool(asked_state["negation"])
    return stem(state["state"]) in stems_of(prompt) - allowed


def is_other_name(prompt: str, name: str) -> bool:
    """Returns True if ``name = 7`` says the value of another variable than the one that a question asks for.

    A name that the question does not have is the response's own, unless the question asks for one by name.
    """
    name = _compact(name)
    function = name.partition("(")[0]
    targets, has_target, is_direct = set[str](), False, False
    for match in _TARGET.finditer(question.asked(prompt)):
        phrase = _compact(match["phrase"])
        if _EXPRESSION.fullmatch(phrase):
            has_target = True
            continue
        names = {*map(_compact, _names(match["phrase"]))}
        targets |= names
        has_target |= bool(names)
        letters = re.sub(r"and|,", "", phrase)
        is_direct |= bool(names) and {*letters} == {*"".join(names)}
    if {name, function} & targets:
        return False
    if function != name and any(target.startswith(f"{function}(") for target in targets):
        return bool(re.search(r"\(-?\d", name))
    return is_direct or (has_target and name in map(_compact, _names(prompt)))


def _names(text: str) -> list[str]:
    return [
        name for name in NAME.findall(text) if name not in _ARTICLES or _is_variable(name, text)
    ]


def _is_variable(name: str, text: str) -> bool:
    """Returns True if a letter that may be an article or a pronoun stands like a variable."""
    letter = rf"(?<![A-Za-z\'\u2019]){name}(?![A-Za-z'\u2019])"
    return bool(
        re.search(rf"\$\s*{letter}\s*\$|{letter}\s*[=+*/^<>-]|[=+*/^<>-]\s*{letter}", text)
        or re.search(rf"{letter}\s*(?:[.?!,;]|\band\b|$)", text)
    )


def _compact(text: str) -> str:
    return re.sub(r"[\s{}$\\]|\b(?:the|exact|value|of)\b", "", text)
