"""Rewards that compare the response with the row's answer: as text or by the row's verifier."""

import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from services.rollout.rewards.reasoning import answer_part

# Tasks whose verifiers compare boards as tuples, which JSON converts to lists.
_BOARD_TASKS: Final = frozenset(("arc_agi", "rearc"))


def answer_text(answer: Any, *, reward: str) -> str:
    """Returns the text of an expected answer.

    Raises:
        ValueError: If there is no answer, or no response can equal it: it is a list or a mapping.
    """
    is_missing = answer is None or (isinstance(answer, float) and math.isnan(answer))
    if is_missing:
        raise ValueError(
            f"{reward} needs an answer, but the row has none; remove such rows (data.train.filters), or set "
            "data.answer_column to the column that has it"
        )
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
    """Compares the texts without surrounding white space; 72.0 as a number also equals the text ``72``.

    Tables convert a column of integers to floating point if a value is missing.

    Raises:
        ValueError: If there is no answer, or it is not one value.
    """
    given = answer_part(response).strip()
    expected = answer_text(answer, reward="exact_match").strip()
    if ignore_case:
        given, expected = given.casefold(), expected.casefold()
    whole = expected.removesuffix(".0") if isinstance(answer, float) else expected
    return float(given in (expected, whole))


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
