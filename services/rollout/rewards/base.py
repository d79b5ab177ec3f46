"""What a reward gets and gives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


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
    split: str = "train"
    """The set of the prompt."""
    earned: object = None
    """What the environment or the agent gave for the episode."""
    turn_lengths: tuple[int, ...] = ()
    """Tokens of each turn that the policy sampled in the judged conversation."""
    episode: Callable[[], Mapping[str, Any]] = dict
    """Describes the whole episode, JSON-like; see :mod:`services.rollout.workflows.history`."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a response is worth."""

    value: float
    """What training sees: the weighted sum."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Its named terms, before weights."""
    tokens: tuple[float, ...] = ()
    """What of the value each token earned that the policy sampled in the judged conversation; none if rewards
    are for the whole response."""


class Reward(Protocol):
    """Scores responses."""

    async def score(self, given: RewardInput) -> Score:
        """Return a finite score.

        Raises:
            CallError: If there is no score. A failure is never a score of 0.
        """
        ...
