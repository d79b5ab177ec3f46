"""Reward of a run: the weighted sum of all rewards that it names, which may differ per set."""

import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from services.common.callables import describe_error, load_callable
from services.common.runspec.rollout import EARNED, REWARD_SERVICES, REWARDS, RewardSpec, is_service
from services.common.runspec.run import RunSpec
from services.common.task_group import TaskGroup, unwrapped
from services.rollout.calls.outside import AddressPolicy, json_text
from services.rollout.calls.pool import CallPool
from services.rollout.failures import CallError
from services.rollout.rewards.answers import BEGIN, COMPARISONS
from services.rollout.rewards.base import (
    OpenRewardService,
    RemoteReward,
    RewardInput,
    Score,
    checked_score,
    earned_terms,
    token_values,
    weighted_score,
)

_PLAIN_TYPES = frozenset({str, bytes, int, float, bool, type(None)})


class Comparison:
    """Evaluates rewards that see more than one response.

    Args:
        specs: Rewards whose ``sees`` is ``group`` or ``pairs``.
    """

    def __init__(self, specs: Sequence[RewardSpec], pool: CallPool) -> None:
        self._specs = tuple(specs)
        self._pool = pool

    async def score(self, inputs: Sequence[RewardInput]) -> list[Score]:
        """Returns the score of each response of a group.

        Args:
            inputs: Responses to one prompt, at least one.

        Raises:
            CallError: If one reward returns no scores; the others are cancelled.
        """
        with unwrapped(CallError):
            async with TaskGroup() as group:
                tasks = [group.create_task(self._values(spec, inputs)) for spec in self._specs]
        values = [task.result() for task in tasks]
        return [
            weighted_score(
                (spec, value[member]) for spec, value in zip(self._specs, values, strict=True)
            )
            for member in range(len(inputs))
        ]

    async def _values(self, spec: RewardSpec, inputs: Sequence[RewardInput]) -> Sequence[Any]:
        if spec.sees == "pairs":
            return await self._wins(spec, inputs)
        values = await self._ask(spec, inputs, [reward_input.response for reward_input in inputs])
        if not isinstance(values, list) or len(values) != len(inputs):
            raise CallError(
                "invalid_value",
                f"reward {spec.name!r} receives the group and must return a list of {len(inputs)} numbers or "
                f"terms, one for each response, got {values!r:.200}",
            )
        return values

    async def _wins(self, spec: RewardSpec, inputs: Sequence[RewardInput]) -> list[float]:
        """Returns each response's mean preference over the other ones, compared in both orders.

        The mean of a single response is 0.5.
        """
        pairs = list(itertools.permutations(range(len(inputs)), 2))
        async with TaskGroup() as group:
            tasks = [
                group.create_task(self._preference(spec, inputs[first], inputs[second]))
                for first, second in pairs
            ]
        wins = [0.0] * len(inputs)
        for (first, second), task in zip(pairs, tasks, strict=True):
            wins[first] += task.result()
            wins[second] += 1.0 - task.result()
        num_questions = 2 * (len(inputs) - 1)
        return [win / num_questions for win in wins] if num_questions else [0.5]

    async def _preference(self, spec: RewardSpec, first: RewardInput, second: RewardInput) -> float:
        value = await self._ask(spec, (first, second), first.response, second.response)
        return checked_score(value, bounds=(0.0, 1.0), name=f"{spec.name} of a pair")

    async def _ask(self, spec: RewardSpec, inputs: Sequence[RewardInput], *responses: Any) -> Any:
        keywords = dict(spec.arguments)
        if spec.sees_episode:
            keywords["episodes"] = [reward_input.episode() for reward_input in inputs]
        reward_input = inputs[0]
        return await self._pool.call(
            spec.name,
            (reward_input.prompt, *responses, reward_input.answer, dict(reward_input.row)),
            keywords,
            timeout_s=spec.timeout_s,
        )


class Scorer:
    """Evaluates all rewards, in the pool's processes or at remote services, and adds them up."""

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        pool: CallPool,
        remotes: Mapping[str, RemoteReward] | None = None,
        *,
        key: str = "rollout.rewards",
    ) -> None:
        """Creates a scorer of the given rewards.

        Args:
            remotes: Service of each reward whose name is a URL.
            key: Specification key of the rewards, for messages.
        """
        self._specs = tuple(specs)
        self._of_responses = [spec for spec in self._specs if spec.sees == "response"]
        self._pool = pool
        self._remotes = remotes or {}
        self._key = key

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        specs: Sequence[RewardSpec],
        pool: CallPool,
        reach: AddressPolicy,
        *,
        concurrency: int,
        key: str = "rollout.rewards",
    ) -> AsyncIterator["Scorer"]:
        """Opens a scorer; loads each reward once, so that a wrong name fails before the run starts.

        Args:
            key: Specification key of the rewards, for messages.

        Raises:
            ValueError: With the key of the wrong reward and the fix.
        """
        async with AsyncExitStack() as stack:
            remotes = {
                term.name: await stack.enter_async_context(
                    _client(term, reach, concurrency=concurrency)
                )
                for term in specs
                if is_service(term.name)
            }
            scorer = cls(specs, pool, remotes, key=key)
            await scorer.check()
            yield scorer

    def comparison(self) -> Comparison | None:
        """Returns the comparison of a group's responses; None if no reward compares."""
        comparing = [spec for spec in self._specs if spec.sees != "response"]
        return Comparison(comparing, self._pool) if comparing else None

    async def check(self) -> None:
        """Loads every reward once, so that a wrong name fails before the run starts.

        Raises:
            ValueError: With the key of the wrong reward and the fix.
        """
        for index, spec in enumerate(self._specs):
            if is_service(spec.name) or spec.name in (EARNED, *COMPARISONS):
                continue
            try:
                await self._pool.check(_reference(spec))
            except CallError as error:
                raise ValueError(f"{self._key}.{index}.name: {error.message}") from error

    async def score(self, reward_input: RewardInput) -> Score:
        """Returns the weighted sum and its terms.

        Raises:
            CallError: If one reward returns no score; the others are cancelled.
        """
        values = await self._values(reward_input)
        columns = {
            spec.column: tuple(token_values(spec, value, reward_input.turn_lengths))
            for spec, value in values
            if spec.column is not None
        }
        values = [(spec, value) for spec, value in values if spec.column is None]
        tokens = [0.0] * sum(reward_input.turn_lengths)
        for index, (spec, value) in enumerate(values):
            if spec.per == "response":
                continue
            earned = token_values(spec, value, reward_input.turn_lengths)
            tokens = [
                sum(pair) for pair in zip(tokens, (spec.weight * e for e in earned), strict=True)
            ]
            values[index] = spec, sum(earned)
        is_split = any(spec.per != "response" for spec, _ in values)
        scored = weighted_score(values)
        return replace(scored, tokens=tuple(tokens) if is_split else (), columns=columns)

    async def _values(self, reward_input: RewardInput) -> list[tuple[RewardSpec, object]]:
        if len(self._of_responses) == 1:
            return [await self._value(self._of_responses[0], reward_input)]
        with unwrapped(CallError):
            async with TaskGroup() as group:
                tasks = [
                    group.create_task(self._value(spec, reward_input))
                    for spec in self._of_responses
                ]
        return [task.result() for task in tasks]

    async def _value(
        self, spec: RewardSpec, reward_input: RewardInput
    ) -> tuple[RewardSpec, object]:
        """Returns a reward and its result: a number, numbers per turn or token, or terms by name."""
        if spec.name == EARNED:
            return earned_terms(spec, reward_input.earned)
        episode = reward_input.episode() if spec.sees_episode else None
        if is_service(spec.name):
            remote = self._remotes[spec.name]
            value = await remote.score(reward_input, episode=episode, timeout_s=spec.timeout_s)
            return spec, _some(spec, value)
        is_begun = reward_input.opens_reasoning and spec.name in REWARDS
        response = BEGIN + reward_input.response if is_begun else reward_input.response
        keywords = spec.arguments if episode is None else {**spec.arguments, "episode": episode}
        if (compare := COMPARISONS.get(spec.name)) is not None:
            return spec, _compared(spec, compare, reward_input, response, keywords)
        value = await self._pool.call(
            _reference(spec),
            (reward_input.prompt, response, reward_input.answer, dict(reward_input.row)),
            keywords,
            timeout_s=spec.timeout_s,
        )
        return spec, _some(spec, value)


class ScorerOfSets:
    """Scores with the rewards of the prompt's set.

    Args:
        common: Scorer of the sets without their own rewards.
        by_set: Scorers of the sets with their own rewards, by set name.
    """

    def __init__(self, common: Scorer, by_set: Mapping[str, Scorer]) -> None:
        self._common = common
        self._by_set = by_set

    @classmethod
    @asynccontextmanager
    async def open(
        cls, spec: RunSpec, pool: CallPool, reach: AddressPolicy
    ) -> AsyncIterator["ScorerOfSets"]:
        """Opens the scorers of a run.

        Raises:
            ValueError: With the key of the wrong reward and the fix.
        """
        concurrency = spec.rollout.reward_concurrency
        async with AsyncExitStack() as stack:
            scorers = {
                key: await stack.enter_async_context(
                    Scorer.open(specs, pool, reach, concurrency=concurrency, key=key)
                )
                for key, specs in spec.rewards.items()
            }
            sets = {s: scorers[k] for s in spec.data.sets if (k := f"data.{s}.rewards") in scorers}
            yield cls(scorers["rollout.rewards"], sets)

    def comparison(self, split: str) -> Comparison | None:
        """Returns the comparison for a split; see :meth:`Scorer.comparison`."""
        return self._by_set.get(split, self._common).comparison()

    async def score(self, reward_input: RewardInput) -> Score:
        """Returns the weighted sum and its terms; see :meth:`Scorer.score`."""
        return await self._by_set.get(reward_input.split, self._common).score(reward_input)


def _compared(
    spec: RewardSpec,
    compare: Callable[..., float],
    reward_input: RewardInput,
    response: str,
    keywords: Mapping[str, Any],
) -> float:
    """Calls a comparison in this process, with the answer that a process of the pool would receive."""
    answer = reward_input.answer
    try:
        if type(answer) not in _PLAIN_TYPES:
            answer = json.loads(json_text(answer))
        return compare(reward_input.prompt, response, answer, reward_input.row, **keywords)
    except (TypeError, ValueError, RecursionError) as error:
        raise CallError(
            "exception", f"{_reference(spec)!r} raised {describe_error(error)}"
        ) from error


def _some(spec: RewardSpec, value: object) -> object:
    if value == {}:
        raise CallError(
            "invalid_value",
            f"reward {spec.name!r} must return a number or at least one term, got no terms",
        )
    return value


def _client(
    spec: RewardSpec, reach: AddressPolicy, *, concurrency: int
) -> AbstractAsyncContextManager[RemoteReward]:
    open_client: OpenRewardService = load_callable(REWARD_SERVICES[spec.name.partition("://")[0]])
    token = str(spec.arguments.get("token", ""))
    return open_client(spec.name, reach=reach, token=token, concurrency=concurrency)


def _reference(spec: RewardSpec) -> str:
    return REWARDS.get(spec.name, spec.name)
