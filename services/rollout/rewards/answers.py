"""Rewards that compare the response with the row's answer: as text, or with the row's own verifier."""

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
