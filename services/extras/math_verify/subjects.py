"""Compares names in a final answer with those in a question: who has 240 sheep, who is the youngest. Pure."""

import re
from functools import lru_cache
from typing import Final

from services.extras.math_verify import asked, question
from services.extras.math_verify.words import AUXILIARY_VERBS, MONTHS, WEEKDAYS, table

_NAME: Final = r"[A-Z][a-z]+(?:\s+[A-Z][a-z]+)*"
_NAMES: Final = rf"{_NAME}(?:(?:,\s*(?:and\s+)?|\s+and\s+){_NAME})*"
_TITLE: Final = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|Sgt)\b\.?\s+(?=[A-Z])")
_ASKED_SUBJECT: Final = re.compile(rf"\b(?:{AUXILIARY_VERBS})\s+{_NAME}\b(?!['\u2019])")
_ASKED_PHRASE: Final = re.compile(r"(?i)\b(?:how|what|which)\b(?:(?!\b(?:if|when)\b)[^?])*")
_COMPARED: Final = re.compile(rf"\bthan\s+{_NAME}")
_SEVERAL: Final = re.compile(r",|\band\b")
_OPPOSITE: Final = re.compile(r"\b(?:fewer|less|shorter|lower|younger|lighter|slower)\b")
_SUBJECT: Final = re.compile(
    rf"(?:^\s*|[.,;!?\n]\s*|\b(?:[Ss]o|[Tt]hus|[Tt]hen|[Hh]ence|[Tt]herefore|that|and)\s+)({_NAMES})"
    rf"(?:\s*[:=]|(?:\s+[a-z]+){{1,4}})?[\s\N{{CURRENCY SIGN}}]*$"
)
_NO_NAME: Final = re.compile(
    rf"(?i)(?:{asked.FUNCTION_WORDS}|{AUXILIARY_VERBS}|the|an?|so|thus|hence|therefore|some|most|many|one|two|three"
    rf"|first|next|finally|also|since|because|how|total|{WEEKDAYS}|{MONTHS})"
)
_STATES_A_FACT: Final = r"\s+(?:had|[a-z]+s|[a-z]+ed)\b"
_NEGATION: Final = re.compile(r"(?i)\b(?:not|never|no)\b|n['\u2019]t\b")
_LEAD: Final = re.compile(r"(?i)^(?:so|thus|hence|therefore)\b,?\s*")
_PAST: Final = table(
    "won:win ran:run ate:eat sold:sell paid:pay spent:spend made:make got:get had:have",
    "has:have was:is were:is are:is did:do does:do came:come took:take lost:lose",
)
_PREDICATE_WORDS: Final = frozenset({"the", "a", "an", "is", "one"})
_MAX_NAME_WORDS: Final = 3


@lru_cache(maxsize=64)
def _asked_names(prompt: str) -> frozenset[str]:
    """Returns the names in a question such as how much Ann gives Bob; none if it asks about no name."""
    asking = question.asked(prompt)
    if _ASKED_SUBJECT.search(asking) is None:
        return frozenset()
    phrases = " ".join(_ASKED_PHRASE.findall(_COMPARED.sub("", asking)))
    return frozenset(re.findall(r"[A-Z][a-z]+", phrases))


def is_of_other_name(prompt: str, before: str, rest: str) -> bool:
    """Returns True for ``Toulouse has 240 sheep`` if a question asks how many Seattle has and names both.

    Args:
        before: What a final answer says before its number.
        rest: What it says after it.
    """
    prompt, before, rest = (_TITLE.sub("", text) for text in (prompt, before, rest))
    asked_names, subject = _asked_names(prompt), _SUBJECT.search(before)
    if not asked_names or subject is None or _OPPOSITE.search(rest) or _SEVERAL.search(subject[1]):
        return False
    names = {
        name for name in re.findall(r"[A-Z][a-z]+", subject[1]) if not _NO_NAME.fullmatch(name)
    }
    if not names or not asked_names.isdisjoint({*names, *re.findall(r"[A-Z][a-z]+", rest)}):
        return False
    return all(_is_name(prompt, name) for name in names)


def _is_name(prompt: str, word: str) -> bool:
    """Returns True if a question has a word only with a capital, inside a sentence or before a verb."""
    return not re.search(rf"\b{word.casefold()}\b", prompt) and bool(
        re.search(rf"[a-z,]\s+{word}\b|\b{word}{_STATES_A_FACT}", prompt)
    )


def without_predicate(prompt: str, expected: str, response: str) -> str:
    """Returns the expected name for a last line such as ``Bob wins`` if the question is who wins."""
    asking = question.asked(prompt)
    line = _LEAD.sub("", response.rstrip().rpartition("\n")[2].replace("**", "")).strip(" .!")
    name, rest = line[: len(expected)], line[len(expected) :]
    if line.casefold().endswith(f" by {expected.casefold()}"):
        name, rest = line[-len(expected) :], f" {line[0].lower()}{line[1 : -len(expected) - 4]}"
    if (
        name.casefold() != expected.casefold()
        or not name[:1].isalpha()
        or len(name.split()) > _MAX_NAME_WORDS
        or not re.fullmatch(r"(?:\s+[a-z]+)+", rest)
        or _NEGATION.search(asking)
    ):
        return response
    allowed = {
        *map(_verb_stem, re.findall(r"[a-z]+", asking.partition(" if ")[0]))
    } | _PREDICATE_WORDS
    return name if {*map(_verb_stem, rest.split())} <= allowed - {"and", "or"} else response


def _verb_stem(word: str) -> str:
    """Returns the infinitive of a verb; nouns lose their plural, too."""
    return _PAST.get(word) or re.sub(r"(?<=..)(?:ed|s)$", "", word)
