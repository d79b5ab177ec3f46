"""Reward of 1 if the response equals the answer, else 0."""

from collections.abc import Mapping
from typing import Any


def exact_match(
    prompt: str,
    response: str,
    answer: Any,
    row: Mapping[str, Any],
    *,
    ignore_case: bool = False,
) -> float:
    """Compares the texts without surrounding white space.

    Raises:
        ValueError: If there is no answer.
    """
    if answer is None:
        raise ValueError("exact_match needs an answer; set data.answer_column")
    given, expected = response.strip(), str(answer).strip()
    if ignore_case:
        given, expected = given.casefold(), expected.casefold()
    return float(given == expected)
