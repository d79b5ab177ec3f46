"""Protocols of rewards and of clients of reward services; their input, and the sum of their terms."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import httpx

from services.common.runspec.rollout import RewardSpec, TermSpec
from services.rollout.calls.outside import AddressPolicy
from services.rollout.failures import CallError


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

    async def score(self, reward_input: RewardInput) -> Score:
        """Returns a finite score.

        Raises:
            CallError: If there is no score. A failure is never a score of 0.
        """


class RemoteReward(Protocol):
    """Client of a service that scores responses."""

    async def score(
        self,
        reward_input: RewardInput,
        *,
        episode: Mapping[str, Any] | None = None,
        timeout_s: float,
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


MAX_TERMS: Final = 64
"""Max terms of one reward; each becomes a curve."""
_MAX_SCORE: Final = 3.4e38
"""Max size of a score; training computes in float32, in which larger ones are infinite."""
_NAME = re.compile(r"[A-Za-z_][\w.\-/]{0,63}")
_UNNAMEABLE = re.compile(r"\W")
_PLAIN = TermSpec()
_SUM = "sum of rollout.rewards"


def checked_score(value: object, *, bounds: tuple[float, float] | None, name: str) -> float:
    """Returns the value if it is a number within the bounds that is finite in float32.

    Raises:
        CallError: ``invalid_value`` for anything else.
    """
    try:
        score = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        score = math.inf
    if not abs(score) <= _MAX_SCORE:  # also refuses NaN
        raise CallError(
            "invalid_value",
            f"reward {name!r} must return a finite number of float32, got {shortened(value)}",
        )
    if bounds is not None and not bounds[0] <= score <= bounds[1]:
        raise CallError(
            "invalid_value",
            f"reward {name!r} must be within [{bounds[0]}, {bounds[1]}], got {score}",
        )
    return score


def named_numbers(value: object, *, subject: str, source: str) -> dict[str, float]:
    """Returns numbers by name; a number without a name is called ``reward``.

    Args:
        value: A number, a mapping, or None for no number at all.

    Raises:
        CallError: ``invalid_value`` for anything else.
    """
    if value is None:
        return {}
    if isinstance(value, int | float):
        value = {"reward": value}
    if not isinstance(value, Mapping):
        raise CallError(
            "invalid_value",
            f"{source}: {subject} must be a number or numbers by name, got {shortened(value)}",
        )
    checked_names(value, source=f"{subject} of {source}")
    return {
        str(name): checked_score(number, bounds=None, name=f"{name} of {source}")
        for name, number in value.items()
    }


def checked_names(names: Iterable[object], *, source: str) -> None:
    """Checks that names are valid for curves.

    Raises:
        CallError: ``invalid_value`` if there are too many, or one is invalid.
    """
    names = [*names]
    if len(names) > MAX_TERMS:
        raise CallError(
            "invalid_value", f"{source} has {len(names)} terms, more than the limit of {MAX_TERMS}"
        )
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise CallError(
                "invalid_value",
                f"{source} has a term named {name!r:.80}; a name starts with a letter and has up to 64 "
                "letters, digits and _ . - /",
            )


def shortened(value: object) -> str:
    if isinstance(value, int):
        return f"an integer of {value.bit_length()} bits"
    return f"{value!r:.200}"


def weighted_score(values: Iterable[tuple[RewardSpec, object]]) -> Score:
    """Returns the weighted sum of the results of all rewards for one response.

    A term keeps the name that its reward gave it; a plain number gets its reward's name. A name
    that is already taken gets a number as suffix.

    Args:
        values: Each reward with its result: a number, or terms by name.

    Raises:
        CallError: ``invalid_value`` if a value is not finite, out of bounds or missing.
    """
    total, terms = 0.0, dict[str, float]()
    for spec, value in values:
        if isinstance(value, Mapping):
            fields = _checked_terms(spec, value)
            weighted = [spec.terms.get(name, _PLAIN).weight * fields[name] for name in fields]
            score = checked_score(sum(weighted), bounds=spec.bounds, name=spec.name)
        else:
            score = checked_score(value, bounds=spec.bounds, name=spec.name)
            fields = {_label(spec.name): score}
        total += spec.weight * score
        for name, term in fields.items():
            terms[_free(name, terms)] = term
    return Score(checked_score(total, bounds=None, name=_SUM), terms)


def token_values(spec: RewardSpec, value: object, turn_lengths: Sequence[int]) -> list[float]:
    """Returns the reward that each sampled token earned, before weights; a turn's last token earns all of it.

    Args:
        turn_lengths: Number of tokens of each sampled turn.

    Raises:
        CallError: ``invalid_value`` unless the result is a list of the right number of finite numbers.
    """
    count = len(turn_lengths) if spec.per == "turn" else sum(turn_lengths)
    if not isinstance(value, list) or len(value) != count:
        raise CallError(
            "invalid_value",
            f"reward {spec.name!r} must return a list of {count} numbers, one for each {spec.per} that the "
            f"policy sampled, got {shortened(value)}",
        )
    name = f"{spec.name} of a {spec.per}"
    numbers = [checked_score(number, bounds=None, name=name) for number in value]
    if spec.per == "token":
        return numbers
    return [
        number if index == length - 1 else 0.0
        for number, length in zip(numbers, turn_lengths, strict=True)
        for index in range(length)
    ]


def sum_of_scores(first: Score, second: Score) -> Score:
    """Adds two scores; a term name that both have gets a number as suffix."""
    terms = dict(first.terms)
    for name, term in second.terms.items():
        terms[_free(name, terms)] = term
    value = checked_score(first.value + second.value, bounds=None, name=_SUM)
    return Score(value, terms, first.tokens or second.tokens, {**first.columns, **second.columns})


def earned_terms(spec: RewardSpec, earned: object) -> tuple[RewardSpec, dict[str, float]]:
    """Converts the reward that an environment or agent returned for an episode to terms.

    Args:
        earned: A number, or ``{"reward": number or terms, "metrics": numbers}``.

    Returns:
        The reward, with weight 0 for metrics, and its terms.

    Raises:
        CallError: ``invalid_value`` if there is no reward, or it has another form.
    """
    reward = {"reward": earned} if isinstance(earned, int | float) else earned
    if not isinstance(reward, Mapping) or not {"reward"} <= set(reward) <= {"reward", "metrics"}:
        raise CallError(
            "invalid_value",
            "reward 'environment' needs a workflow that scores its episodes: an environment, or an agent "
            'that returns a number or {"reward": terms, "metrics": numbers}, got '
            f"{shortened(earned)}",
        )
    terms = named_numbers(reward["reward"], subject="reward", source="the episode")
    metrics = named_numbers(reward.get("metrics"), subject="metrics", source="the episode")
    values = {**metrics, **terms}
    term_specs = {name: TermSpec(weight=0.0) for name in set(metrics) - set(terms)} | dict(
        spec.terms
    )
    # An episode that was cut short may lack some terms.
    present = {name: term for name, term in term_specs.items() if name in values}
    return spec.model_copy(update={"terms": present}), values


def _checked_terms(spec: RewardSpec, value: Mapping[object, object]) -> dict[str, float]:
    checked_names(value, source=f"reward {spec.name!r}")
    if missing_terms := sorted(set(spec.terms) - set(value)):
        raise CallError(
            "invalid_value",
            f"reward {spec.name!r} returned {', '.join(map(str, value)) or 'no terms'}, but not "
            f"{', '.join(missing_terms)}, which its terms in the specification require",
        )
    return {
        str(name): checked_score(
            term, bounds=spec.terms.get(str(name), _PLAIN).bounds, name=f"{spec.name}: {name}"
        )
        for name, term in value.items()
    }


def _label(name: str) -> str:
    """Returns the term name of a reward that returns a plain number."""
    if "://" in name:
        url = httpx.URL(name)
        name = _UNNAMEABLE.sub("_", url.path.strip("/").rpartition("/")[2] or url.host)
    return name.rpartition(":")[2]


def _free(name: str, terms: Mapping[str, float]) -> str:
    names = (name, *(f"{name}-{number}" for number in range(2, len(terms) + 3)))
    return next(free for free in names if free not in terms)
