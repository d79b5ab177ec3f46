"""Three-digit addition by chat, for a small real model."""

import random
import re
from typing import Any

NUM_HELDOUT = 256
_NUMBER = re.compile(r"\d+")

Row = dict[str, str]


def train(count: int = 16_384, seed: int = 1) -> list[Row]:
    """Returns questions with answers; none of them is held out."""
    return [_row(one, two) for one, two in _training(count, seed)]


def heldout() -> list[Row]:
    """Returns questions that are only evaluated."""
    return [_row(one, two) for one, two in _draw(NUM_HELDOUT, 0)]


def pairs(count: int = 4096, seed: int = 2) -> list[Row]:
    """Returns questions with the sum and a number that differs from it in one digit."""
    rng = random.Random(seed)
    return [
        {
            **_row(one, two),
            "chosen": str(one + two),
            "rejected": str(one + two + rng.choice((-100, -10, -1, 1, 10, 100))),
        }
        for one, two in _training(count, seed)
    ]


def score(response: str, answer: str) -> float:
    """Returns 1 if the last number of a response is the answer."""
    numbers = _NUMBER.findall(response.replace(",", ""))
    return float(bool(numbers) and numbers[-1] == answer)


def reward(prompt: str, response: str, answer: str | None, row: dict[str, Any]) -> float:
    """Scores a response with :func:`score`."""
    return score(response, answer or "")


def _training(count: int, seed: int) -> list[tuple[int, int]]:
    known = set(_draw(NUM_HELDOUT, 0))
    return [pair for pair in _draw(count, seed) if pair not in known]


def _draw(count: int, seed: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    return [(rng.randint(100, 999), rng.randint(100, 999)) for _ in range(count)]


def _row(one: int, two: int) -> Row:
    return {"prompt": f"What is {one} + {two}?", "answer": str(one + two)}
