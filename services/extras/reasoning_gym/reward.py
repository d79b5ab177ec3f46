"""Reward ``reasoning_gym``: the verifier of the task that generated the row."""

import functools
import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Final

from services.rollout.rewards.answers import answer_part

# Tasks whose verifiers compare boards as tuples, which JSON converts to lists.
_BOARD_TASKS: Final = frozenset(("arc_agi", "rearc"))
# Tasks whose verifiers give 1 for the first digits of the answer.
_PREFIX_TASKS: Final = frozenset(("coin_flip",))
# Tasks whose verifiers take every text for True.
_BOOLEAN_TASKS: Final = frozenset(("game_of_life_halting",))
# Tasks whose verifiers ignore what follows the answer.
_WHOLE_TASKS: Final = frozenset(("spell_backward",))
_NUMBERS_TASKS: Final = frozenset(("fraction_simplification",))
# Tasks with several right answers, in which "not" may be a word of the answer.
_LADDER_TASKS: Final = frozenset(("word_ladder",))
_HEDGE: Final = re.compile(r"\b(?:or|not)\b", re.IGNORECASE)
_TOLERANCE: Final = 1e-4
"""Difference of the numbers that the verifier of ``coin_flip`` regards as equal."""
_RELATIVE_TOLERANCE: Final = 1e-2
"""Relative difference of small numbers that are regarded as equal."""
_WORD: Final = re.compile(r"[A-Za-z]+")
_NO_NUMBER: Final = re.compile(r"(?:nan|inf|infinity)[ij]?", re.IGNORECASE)
_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?")
_ONE_NUMBER: Final = re.compile(r"[-+]?[\d.,/]+(?:e[-+]?\d+)?", re.IGNORECASE)
_NEGATIVE: Final = re.compile(r"[\s$*]*[-\u2212](?=.*[1-9]).*", re.DOTALL)
_IGNORED: Final = re.compile(r"[\s.,;'\"$*`]+")
"""Characters that are no part of an answer."""
_FUNCTIONS: Final = (
    "C",
    "log",
    "ln",
    "exp",
    "sqrt",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
)
_SYMBOLS: Final = re.compile(r"\*\*|\bC\b")
"""Signs of a formula of sympy."""
_FULL: Final = 1.0 - 1e-9
"""Score of a right answer; shares of letters sum to a little less than 1."""
_MAX_WORDS: Final = 4
"""Words of a text that may be a number."""


def gym_answer(prompt: str, response: str, answer: Any, row: Mapping[str, Any]) -> float:
    """Returns the score, between 0 and 1, from the verifier of the task that generated the row.

    The answer is the response's text between ``<answer>`` and ``</answer>``, as the package's own prompts
    require it; without these tags, it is the whole response. The verifier has the arguments of the row's
    ``task``, or the task's defaults if the row has none.

    Raises:
        ValueError: If the row is not from ``reasoning-gym``.
    """
    from reasoning_gym.utils import extract_answer

    metadata = row.get("metadata")
    if not isinstance(metadata, Mapping) or "source_dataset" not in metadata:
        raise ValueError(
            "the row has no metadata.source_dataset; use this reward with data.train.source reasoning_gym"
        )
    response = answer_part(response)
    tagged = extract_answer(response)
    answer_text = response.strip() if tagged is None else tagged
    entry = dict(row)
    if metadata["source_dataset"] in _BOARD_TASKS:
        entry["metadata"] = {**metadata, "output": tuple(map(tuple, metadata["output"]))}
    task = row.get("task") or {"name": metadata["source_dataset"], "arguments": {}}
    verify = _gym_verifier(task["name"], json.dumps(task["arguments"], sort_keys=True))
    if _is_no_number(answer_text, row.get("answer")):
        return 0.0
    score = _score(verify, entry, answer_text)
    if score is None:
        # Some verifiers raise for a text of another form; others are broken, or the row is.
        verify(answer=row.get("answer"), entry=entry)
        return 0.0
    if _is_hedged(metadata["source_dataset"], answer_text, row.get("answer")):
        return 0.0
    if score < _FULL:
        return score
    if _is_other(metadata["source_dataset"], answer_text, row.get("answer")):
        return 0.0
    return float(not _has_ignored_text(verify, answer_text, entry))


def _is_hedged(task: str, text: str, answer: Any) -> bool:
    """Returns True for ``6 or 7`` and ``not 6``, to which verifiers give a part of the credit for 6."""
    return (
        task not in _LADDER_TASKS and bool(_HEDGE.search(text)) and not _HEDGE.search(str(answer))
    )


def _is_other(task: str, text: str, answer: Any) -> bool:
    """Returns True if a text is not the answer, although the verifier of the task accepts it."""
    reference = str(answer)
    if task in _PREFIX_TASKS:
        return _differ(text, answer)
    if task in _BOOLEAN_TASKS:
        return text.strip().rstrip(".").casefold() != reference.casefold()
    if task in _WHOLE_TASKS:
        return text.strip().casefold() != reference.strip().casefold()
    return task in _NUMBERS_TASKS and re.findall(r"\d+", text) != re.findall(r"\d+", reference)


def _has_ignored_text(verify: Callable[..., Any], text: str, entry: Mapping[str, Any]) -> bool:
    """Returns True if the verifier also accepts a text without its first or last word or character.

    Many verifiers search a text for the answer, or read as much of it as they need.
    """
    answer = str(entry.get("answer"))
    stripped = text.strip()
    if _IGNORED.sub("", stripped).casefold() == _IGNORED.sub("", answer).casefold():
        return False
    if _SYMBOLS.search(answer) and {*_WORD.findall(stripped)} - {
        *_WORD.findall(answer),
        *_FUNCTIONS,
    }:
        return True
    signs = [bool(_NEGATIVE.fullmatch(number_text)) for number_text in (stripped, answer)]
    if _ONE_NUMBER.fullmatch(answer) and signs[0] != signs[1]:
        return True
    numbers = [_NUMBER.findall(number_text) for number_text in (stripped, answer)]
    if not _WORD.search(answer) and len(numbers[0]) > len(numbers[1]) > 0:
        return True
    shorter = {stripped.partition(" ")[2], stripped.rpartition(" ")[0]}
    shorter |= {stripped.partition("\n")[2], stripped.rpartition("\n")[0]}
    if not _ONE_NUMBER.fullmatch(stripped):
        shorter |= {stripped[1:], stripped[:-1]}
    return any(
        (_score(verify, entry, shortened) or 0.0) >= _FULL for shortened in shorter - {"", stripped}
    )


def _score(verify: Callable[..., Any], entry: Mapping[str, Any], text: str) -> float | None:
    """Returns the verifier's score of a text; None if the verifier raises for it."""
    try:
        return float(verify(answer=text, entry=entry))
    except (ImportError, OSError, MemoryError):  # no fault of the response; includes TimeoutError
        raise
    except Exception:  # noqa: BLE001 -- each verifier has its own
        return None


def _is_no_number(text: str, answer: Any) -> bool:
    """Returns True for NaN and infinity where the answer is neither.

    Verifiers that map a distance to a score, such as that of ``complex_arithmetic``, give 1 for NaN.
    """
    words = _WORD.findall(text)
    return (
        len(words) <= _MAX_WORDS
        and any(map(_NO_NUMBER.fullmatch, words))
        and not any(map(_NO_NUMBER.fullmatch, _WORD.findall(str(answer))))
    )


def _differ(text: str, answer: Any) -> bool:
    """Returns True if a text and an answer are different numbers."""
    try:
        numbers = [
            float(Fraction(str(number_text).replace(",", ""))) for number_text in (text, answer)
        ]
    except (ValueError, ZeroDivisionError, OverflowError):
        return False
    tolerance = min(_TOLERANCE, abs(numbers[1]) * _RELATIVE_TOLERANCE)
    return abs(numbers[0] - numbers[1]) > tolerance


@functools.cache
def _gym_verifier(name: str, arguments: str) -> Callable[..., Any]:
    import reasoning_gym

    verify: Callable[..., Any] = reasoning_gym.create_dataset(
        name, **json.loads(arguments)
    ).score_answer
    return verify
