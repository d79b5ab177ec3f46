"""Rewards that compare the response with the row's answer: as text, or with the row's own verifier."""

import math
from collections.abc import Mapping
from typing import Any


def answer_text(answer: Any, *, reward: str) -> str:
    """Returns the text of an expected answer.

    Raises:
        ValueError: If there is no answer, or no response can equal it: it is a list or a mapping.
    """
    is_missing = answer is None or (isinstance(answer, float) and math.isnan(answer))
    if is_missing:
        raise ValueError(f"{reward} needs an answer; set data.answer_column")
    if isinstance(answer, Mapping | list | tuple):
        raise ValueError(  # noqa: TRY004 -- the data is wrong, not an argument's type
            f"{reward} needs text or a number as the answer, got {answer!r:.80}; set data.answer_column to a "
            "column with one value, such as COLUMN.KEY of a mapping, or use a reward of your own"
        )
    return str(answer)


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
        ValueError: If there is no answer, or it is not one value.
    """
    given, expected = response.strip(), answer_text(answer, reward="exact_match").strip()
    if ignore_case:
        given, expected = given.casefold(), expected.casefold()
    return float(given == expected)


def gym_answer(prompt: str, response: str, answer: Any, row: Mapping[str, Any]) -> float:
    """Returns the score, between 0 and 1, from the verifier of the task that generated the row.

    The answer is what the response has between ``<answer>`` and ``</answer>``, as the package's own prompts
    require it; without these tags, it is the whole response.

    Raises:
        ValueError: If the row is not from ``reasoning-gym``.
    """
    import reasoning_gym
    from reasoning_gym.utils import extract_answer

    metadata = row.get("metadata")
    if not isinstance(metadata, Mapping) or "source_dataset" not in metadata:
        raise ValueError(
            "the row has no metadata.source_dataset; use this reward with data.train.source reasoning_gym"
        )
    score = reasoning_gym.get_score_answer_fn(metadata["source_dataset"])
    tagged = extract_answer(response)
    found = response.strip() if tagged is None else tagged
    return float(score(answer=found, entry=dict(row)))
