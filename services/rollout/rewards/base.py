"""Protocols of rewards and of clients of reward services, with their input and result."""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.rollout.calls.outside import AddressPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardInput:
    """Response to score, with its prompt's data."""

    prompt: str
    """Text of the prompt."""
    response: str
    """Text of the response, without special tokens."""
    answer: Any
    """Expected answer; None if the data has none."""
    row: Mapping[str, Any]
    """Data row of the prompt."""
    split: str = "train"
    """Set of the prompt."""
    earned: object = None
    """Reward that the environment or the agent returned for the episode."""
    opens_reasoning: bool = False
    """True if the chat template began the response's reasoning at the end of the prompt."""
    turn_lengths: tuple[int, ...] = ()
    """Number of tokens of each turn that the policy sampled in the scored conversation."""
    episode: Callable[[], Mapping[str, Any]] = dict
    """Returns a JSON-like episode description; see :mod:`services.rollout.workflows.training`."""


@dataclass(frozen=True, slots=True)
class Score:
    """Score of one response."""

    value: float
    """Weighted sum that training uses."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Named terms of the sum, before weights."""
    tokens: tuple[float, ...] = ()
    """Share of the value that each sampled token of the scored conversation earned.

    Empty if all rewards are for the entire response.
    """
    columns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Further numbers of each sampled token, by column."""


class Reward(Protocol):
    """Scores responses."""

    async def score(self, given: RewardInput) -> Score:
        """Returns a finite score.

        Raises:
            CallError: If there is no score. A failure is never a score of 0.
        """


class RemoteReward(Protocol):
    """Client of a service that scores responses."""

    async def score(
        self, given: RewardInput, *, episode: Mapping[str, Any] | None = None, timeout_s: float
    ) -> Any:
        """Returns the service's score: a number, or terms by name.

        Raises:
            CallError: ``timeout`` after the deadline; ``exception`` if the service refuses or fails;
                ``invalid_value`` if it returns no score.
        """


class OpenRewardService(Protocol):
    """Opens a client of services whose URLs have a scheme (door ``slipstream.reward_services``)."""

    def __call__(
        self, url: str, /, *, reach: AddressPolicy, token: str, concurrency: int
    ) -> AbstractAsyncContextManager[RemoteReward]:
        """Opens a client while the block runs.

        Args:
            reach: Policy that the address must satisfy.
            token: Token for the service; empty without one.
            concurrency: Max number of concurrent calls.
        """
