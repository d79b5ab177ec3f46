"""A process that evaluates rewards: one JSON request per line in, one JSON answer per line out.

User code runs here and nowhere else: it may hang, crash or print without touching the engine.
"""

import asyncio
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from services.common.callables import load_callable

# By reference, because a worker loads only what its run names: math-verify alone takes seconds.
_BUILT_IN = {
    "exact_match": "services.rollout.rewards.exact_match:exact_match",
    "math_verify": "services.rollout.rewards.math_answer:math_answer",
    "reasoning_gym": "services.rollout.rewards.gym_answer:gym_answer",
}


def main() -> None:
    """Answer requests until the input ends."""
    # The answers keep the original standard output; whatever user code prints goes to standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        reward = _resolve(request["name"])
        if "response" not in request:
            return {"value": None}
        value = reward(
            request["prompt"],
            request["response"],
            request["answer"],
            request["row"],
            **request["arguments"],
        )
        if inspect.isawaitable(value):
            value = asyncio.run(_wait_for(value))
    except Exception as error:  # noqa: BLE001 -- the edge to user code: every fault becomes an answer
        return {"error": f"{type(error).__name__}: {error}"}
    item = getattr(value, "item", None)
    value = item() if callable(item) else value
    return {"value": value} if isinstance(value, int | float) else {"value": repr(value)}


@functools.cache
def _resolve(name: str) -> Callable[..., Any]:
    return load_callable(_BUILT_IN.get(name, name))


async def _wait_for(value: Any) -> Any:
    return await value


if __name__ == "__main__":
    main()
