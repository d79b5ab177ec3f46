"""Reward ``reasoning_gym``: the verifier of the task that generated the row."""

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from services.rollout.rewards.answers import answer_part

# Tasks whose verifiers compare boards as tuples, which JSON converts to lists.
_BOARD_TASKS: Final = frozenset(("arc_agi", "rearc"))


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
    found = response.strip() if tagged is None else tagged
    entry = dict(row)
    if metadata["source_dataset"] in _BOARD_TASKS:
        entry["metadata"] = {**metadata, "output": tuple(map(tuple, metadata["output"]))}
    task = row.get("task") or {"name": metadata["source_dataset"], "arguments": {}}
    verify = _gym_verifier(task["name"], json.dumps(task["arguments"], sort_keys=True))
    return float(verify(answer=found, entry=entry))


@functools.cache
def _gym_verifier(name: str, arguments: str) -> Callable[..., Any]:
    import reasoning_gym

    verify: Callable[..., Any] = reasoning_gym.create_dataset(
        name, **json.loads(arguments)
    ).score_answer
    return verify
