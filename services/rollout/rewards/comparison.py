"""Rewards that compare the responses of a group: all at once, or in pairs."""

import itertools
from collections.abc import Sequence
from typing import Any

from services.common.runspec.rollout import RewardSpec
from services.common.task_group import TaskGroup, unwrapped
from services.rollout.calls.pool import CallPool
from services.rollout.failures import CallError
from services.rollout.rewards.base import RewardInput, Score
from services.rollout.rewards.numbers import checked_score
from services.rollout.rewards.terms import weighted_score


class Comparison:
    """Evaluates rewards that see more than one response.

    Args:
        specs: Rewards whose ``sees`` is ``group`` or ``pairs``.
    """

    def __init__(self, specs: Sequence[RewardSpec], pool: CallPool) -> None:
        self._specs = tuple(specs)
        self._pool = pool

    async def score(self, given: Sequence[RewardInput]) -> list[Score]:
        """Returns the score of each response of a group.

        Args:
            given: Responses to one prompt, at least one.

        Raises:
            CallError: If one reward returns no scores; the others are cancelled.
        """
        with unwrapped(CallError):
            async with TaskGroup() as group:
                tasks = [group.create_task(self._values(spec, given)) for spec in self._specs]
        values = [task.result() for task in tasks]
        return [
            weighted_score(
                (spec, value[member]) for spec, value in zip(self._specs, values, strict=True)
            )
            for member in range(len(given))
        ]

    async def _values(self, spec: RewardSpec, given: Sequence[RewardInput]) -> Sequence[Any]:
        if spec.sees == "pairs":
            return await self._wins(spec, given)
        values = await self._ask(spec, given, [one.response for one in given])
        if not isinstance(values, list) or len(values) != len(given):
            raise CallError(
                "invalid_value",
                f"reward {spec.name!r} receives the group and must return a list of {len(given)} numbers or "
                f"terms, one for each response, got {values!r:.200}",
            )
        return values

    async def _wins(self, spec: RewardSpec, given: Sequence[RewardInput]) -> list[float]:
        """Returns each response's mean preference over the others, in both orders; 0.5 without others."""
        pairs = list(itertools.permutations(range(len(given)), 2))
        async with TaskGroup() as group:
            tasks = [
                group.create_task(self._preference(spec, given[first], given[second]))
                for first, second in pairs
            ]
        wins = [0.0] * len(given)
        for (first, second), task in zip(pairs, tasks, strict=True):
            wins[first] += task.result()
            wins[second] += 1.0 - task.result()
        asked = 2 * (len(given) - 1)
        return [win / asked for win in wins] if asked else [0.5]

    async def _preference(self, spec: RewardSpec, first: RewardInput, second: RewardInput) -> float:
        value = await self._ask(spec, (first, second), first.response, second.response)
        return checked_score(value, bounds=(0.0, 1.0), name=f"{spec.name} of a pair")

    async def _ask(self, spec: RewardSpec, given: Sequence[RewardInput], *seen: Any) -> Any:
        keywords = dict(spec.arguments)
        if spec.sees_episode:
            keywords["episodes"] = [one.episode() for one in given]
        one = given[0]
        return await self._pool.call(
            spec.name,
            (one.prompt, *seen, one.answer, dict(one.row)),
            keywords,
            timeout_s=spec.timeout_s,
        )
