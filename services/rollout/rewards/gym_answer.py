"""Reward from the verifier of a ``reasoning-gym`` task."""

from collections.abc import Mapping
from typing import Any

import reasoning_gym


def gym_answer(prompt: str, response: str, answer: Any, row: Mapping[str, Any]) -> float:
    """Returns the score, between 0 and 1, from the verifier of the task that generated the row.

    Raises:
        ValueError: If the row is not from ``reasoning-gym``.
    """
    metadata = row.get("metadata")
    if not isinstance(metadata, Mapping) or "source_dataset" not in metadata:
        raise ValueError(
            "the row has no metadata.source_dataset; use this reward with data.train.source reasoning_gym"
        )
    score = reasoning_gym.get_score_answer_fn(metadata["source_dataset"])
    return float(score(answer=response.strip(), entry=dict(row)))
