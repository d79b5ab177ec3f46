"""The reward of a run: the weighted sum of its terms."""

import asyncio
from collections.abc import Sequence

from services.common.spec.rollout import RewardSpec
from services.rollout.failures import RewardError
from services.rollout.rewards.base import RewardInput, checked_score
from services.rollout.rewards.pool import RewardPool


class Scorer:
    """Evaluates every term in the pool's processes and adds them up."""

    def __init__(self, specs: Sequence[RewardSpec], pool: RewardPool) -> None:
        self._specs = tuple(specs)
        self._pool = pool

    async def check(self) -> None:
        """Load every term once, so that a wrong name fails before the run starts.

        Raises:
            ValueError: Naming the key of the term and the fix.
        """
        for index, spec in enumerate(self._specs):
            try:
                await self._pool.check(spec.name)
            except RewardError as error:
                raise ValueError(f"rollout.rewards.{index}.name: {error.message}") from error

    async def score(self, given: RewardInput) -> float:
        """Return the weighted sum.

        Raises:
            RewardError: If one term has no score; the other terms are stopped.
        """
        terms = [self._term(spec, given) for spec in self._specs]
        if len(terms) == 1:
            return await terms[0]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(term) for term in terms]
        except* RewardError as errors:
            raise _first(errors) from None
        return sum(task.result() for task in tasks)

    async def _term(self, spec: RewardSpec, given: RewardInput) -> float:
        value = await self._pool.evaluate(
            {
                "name": spec.name,
                "arguments": spec.arguments,
                "prompt": given.prompt,
                "response": given.response,
                "answer": given.answer,
                "row": dict(given.row),
            },
            timeout_s=spec.timeout_s,
        )
        return spec.weight * checked_score(value, bounds=spec.bounds, name=spec.name)


def _first(errors: BaseExceptionGroup[RewardError]) -> RewardError:
    """One error of a group; the others were consequences or say the same."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, RewardError)
    return error
