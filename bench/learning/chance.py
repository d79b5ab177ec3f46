"""A task that takes real work and teaches nothing; needs no package, as reward processes import it."""

import random
from typing import Any

_NUM_PROMPTS = 4096


def prompts() -> list[dict[str, str]]:
    """Prompts of 100 bytes."""
    rng = random.Random(0)
    return [{"prompt": f"{rng.getrandbits(400):0100x}"} for _ in range(_NUM_PROMPTS)]


def reward(prompt: str, response: str, answer: str | None, row: dict[str, Any]) -> float:
    """1 for about half of the responses, so that groups have a spread and each is trained on."""
    return float(len(response) % 2)
