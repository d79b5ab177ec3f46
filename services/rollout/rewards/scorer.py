"""Reward of a run: the weighted sum of all rewards that it names, which may differ per set."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from services.common.runspec.rollout import EARNED, REWARDS, SERVICES, RewardSpec
from services.common.runspec.run import RunSpec
from services.common.task_group import TaskGroup, unwrapped
from services.rollout.calls.outside import AddressPolicy
from services.rollout.calls.pool import CallPool
from services.rollout.failures import CallError
from services.rollout.rewards.base import RewardInput, Score
from services.rollout.rewards.comparison import Comparison
from services.rollout.rewards.remote import (
    GrpcRewardService,
    HttpRewardService,
    RemoteReward,
    RewardService,
)
from services.rollout.rewards.terms import earned_terms, token_values, weighted_score

_GRPC = ("grpc://", "grpcs://")


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
                    RemoteReward(term.name, _service(term, reach), concurrency=concurrency)
                )
                for term in specs
                if is_url(term.name)
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
            if is_url(spec.name) or spec.name == EARNED:
                continue
            try:
                await self._pool.check(_reference(spec))
            except CallError as error:
                raise ValueError(f"{self._key}.{index}.name: {error.message}") from error

    async def score(self, given: RewardInput) -> Score:
        """Returns the weighted sum and its terms.

        Raises:
            CallError: If one reward returns no score; the others are cancelled.
        """
        with unwrapped(CallError):
            async with TaskGroup() as group:
                tasks = [
                    group.create_task(self._value(spec, given))
                    for spec in self._specs
                    if spec.sees == "response"
                ]
        values = [task.result() for task in tasks]
        tokens = [0.0] * sum(given.turn_lengths)
        for place, (spec, value) in enumerate(values):
            if spec.per == "response":
                continue
            earned = token_values(spec, value, given.turn_lengths)
            tokens = [
                sum(pair) for pair in zip(tokens, (spec.weight * e for e in earned), strict=True)
            ]
            values[place] = spec, sum(earned)
        is_split = any(spec.per != "response" for spec, _ in values)
        return replace(weighted_score(values), tokens=tuple(tokens) if is_split else ())

    async def _value(self, spec: RewardSpec, given: RewardInput) -> tuple[RewardSpec, object]:
        """Returns a reward and its result: a number, numbers per turn or token, or terms by name."""
        if spec.name == EARNED:
            return earned_terms(spec, given.earned)
        episode = given.episode() if spec.sees_episode else None
        if is_url(spec.name):
            remote = self._remotes[spec.name]
            value = await remote.score(given, episode=episode, timeout_s=spec.timeout_s)
            return spec, _some(spec, value)
        value = await self._pool.call(
            _reference(spec),
            (given.prompt, given.response, given.answer, dict(given.row)),
            spec.arguments if episode is None else {**spec.arguments, "episode": episode},
            timeout_s=spec.timeout_s,
        )
        return spec, _some(spec, value)


class ScorerOfSets:
    """Scores with the rewards of the prompt's set.

    Args:
        common: Scorer of the sets without their own rewards.
    """

    def __init__(self, common: Scorer, own: Mapping[str, Scorer]) -> None:
        self._common = common
        self._own = own

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
            own = {s: scorers[k] for s in spec.data.sets if (k := f"data.{s}.rewards") in scorers}
            yield cls(scorers["rollout.rewards"], own)

    def comparison(self, split: str) -> Comparison | None:
        """Returns the comparison for a split; see :meth:`Scorer.comparison`."""
        return self._own.get(split, self._common).comparison()

    async def score(self, given: RewardInput) -> Score:
        """Returns the weighted sum and its terms; see :meth:`Scorer.score`."""
        return await self._own.get(given.split, self._common).score(given)


def _some(spec: RewardSpec, value: object) -> object:
    if value == {}:
        raise CallError(
            "invalid_value",
            f"reward {spec.name!r} must return a number or at least one term, got no terms",
        )
    return value


def is_url(name: str) -> bool:
    """Returns True if a reward's name is the address of a service."""
    return name.startswith(SERVICES)


def _service(spec: RewardSpec, reach: AddressPolicy) -> RewardService:
    token = str(spec.arguments.get("token", ""))
    if spec.name.startswith(_GRPC):
        return GrpcRewardService(spec.name, reach=reach, token=token)
    return HttpRewardService(spec.name, reach=reach, token=token)


def _reference(spec: RewardSpec) -> str:
    return REWARDS.get(spec.name, spec.name)
