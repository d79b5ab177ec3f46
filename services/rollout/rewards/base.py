"""What a reward gets and gives."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from services.rollout.failures import CallError


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardInput:
    """One response and what is known about its prompt."""

    prompt: str
    """Text of the prompt."""
    response: str
    """Text of the response, special tokens left out."""
    answer: Any
    """Expected answer; None if the data has none."""
    row: Mapping[str, Any]
    """The whole row of the prompt."""


class Reward(Protocol):
    """Scores responses."""

    async def score(self, given: RewardInput) -> float:
        """Return a finite score.

        Raises:
            CallError: If there is no score. A failure is never a score of 0.
        """
        ...


def checked_score(value: object, *, bounds: tuple[float, float] | None, name: str) -> float:
    """Accept a finite number within the bounds.

    Raises:
        CallError: ``invalid_value`` for anything else.
    """
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise CallError(
            "invalid_value", f"reward {name!r} must return a finite number, but returned {value!r}"
        )
    if bounds is not None and not bounds[0] <= value <= bounds[1]:
        raise CallError(
            "invalid_value",
            f"reward {name!r} must be within {bounds[0]} and {bounds[1]}, but is {value}",
        )
    return float(value)
