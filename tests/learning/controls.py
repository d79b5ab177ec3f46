"""sort4 with training rewards that do not depend on the response; held-out rewards are correct."""

import random
from collections.abc import Mapping
from typing import Any

from services.common.callables import load_callable
from tests.helpers.cli import REPOSITORY


def heldout() -> list[dict[str, Any]]:
    """Returns the held-out prompts of sort4, marked as held-out."""
    rows = load_callable(f"{REPOSITORY}/examples/sort4.py:heldout")()
    return [{**row, "heldout": True} for row in rows]


def unrelated(prompt: str, response: str, answer: Any, row: Mapping[str, Any]) -> float:
    """Returns 1 for a random fifth of training responses; on held-out prompts, 1 for an exact match."""
    if row.get("heldout"):
        return float(response.strip() == answer)
    return float(random.random() < 0.2)
