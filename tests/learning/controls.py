"""sort4 with training rewards that have nothing to do with the response; held-out ones stay honest."""

import random
from collections.abc import Mapping
from typing import Any

from services.common.callables import load_callable
from tests.helpers.cli import REPOSITORY


def heldout() -> list[dict[str, Any]]:
    """Returns the held-out prompts of sort4, marked."""
    rows = load_callable(f"{REPOSITORY}/examples/sort4.py:heldout")()
    return [{**row, "heldout": True} for row in rows]


def unrelated(prompt: str, response: str, answer: Any, row: Mapping[str, Any]) -> float:
    """Returns 1 for every fifth training response, whatever its text; exact match on held-out prompts."""
    if row.get("heldout"):
        return float(response.strip() == answer)
    return float(random.random() < 0.2)
