"""Three-digit addition as a chat task. Imports no package, because reward processes import it."""

import random
import re
from typing import Any

NUM_HELDOUT = 256
_NUMBER = re.compile(r"\d+")


def rows(count: int = 16_384, seed: int = 1) -> list[dict[str, str]]:
    """Returns questions with answers; none of them is held out."""
    known = {(row["prompt"]) for row in heldout()}
    return [row for row in _rows(count, seed) if row["prompt"] not in known]


def heldout() -> list[dict[str, str]]:
    """Returns questions that are only evaluated."""
    return _rows(NUM_HELDOUT, 0)


def score(response: str, answer: str) -> float:
    """Returns 1 if the last number of a response is the answer."""
    numbers = _NUMBER.findall(response.replace(",", ""))
    return float(bool(numbers) and numbers[-1] == answer)


def reward(prompt: str, response: str, answer: str | None, row: dict[str, Any]) -> float:
    """Scores a response with :func:`score`."""
    return score(response, answer or "")


def _rows(count: int, seed: int) -> list[dict[str, str]]:
    rng = random.Random(seed)
    pairs = [(rng.randint(100, 999), rng.randint(100, 999)) for _ in range(count)]
    return [{"prompt": f"What is {one} + {two}?", "answer": str(one + two)} for one, two in pairs]
