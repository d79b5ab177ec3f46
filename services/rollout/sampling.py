"""Groups in, scored and published groups out.

StartGroups -> GroupSampler -> member: workflow -> engine ... -> reward    (concurrently per member)
                            -> all members done -> publisher -> transferqueue
                            -> a member failed  -> reporter  -> controller
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from services.common.models.tokenizer import Tokenizer
from services.common.spec.rollout import RolloutSpec
from services.rollout import metrics
from services.rollout.client import GroupAssignment
from services.rollout.engines.base import Engine
from services.rollout.failures import GroupError, RewardError
from services.rollout.prompts import Prompt, PromptBook
from services.rollout.rewards.base import Reward, RewardInput
from services.rollout.samples import Sample
from services.rollout.workflows.base import Episode, EpisodeLimits, Workflow

logger = logging.getLogger(__name__)

_NUM_REMEMBERED = 100_000
"""Groups whose attempts are remembered, so that a repeated request does not start them again."""


class Publisher(Protocol):
    """Makes finished groups visible to the trainer."""

    async def publish(
        self, assignment: GroupAssignment, prompt: Prompt, samples: list[Sample]
    ) -> None:
        """Store a group. Raises GroupError if it cannot be stored."""
        ...


ReportFailure = Callable[[GroupAssignment, GroupError], Awaitable[None]]
"""Tells the controller that a group ended without samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What sampling works with."""

    engine: Engine
    """Generates."""
    tokenizer: Tokenizer
    """The model's."""
    prompts: PromptBook
    """The run's data."""
    workflow: Workflow
    """Shapes episodes."""
    reward: Reward
    """Scores them."""
    publisher: Publisher
    """Takes finished groups."""
    report_failure: ReportFailure
    """Takes failed groups."""


class GroupSampler:
    """Runs groups concurrently; the engine's queue decides which samples are decoded first.

    A group ends in exactly one way: published, reported as failed, or cancelled by the controller. A fault
    of ours in one of them cancels the task that entered the sampler.
    """

    def __init__(self, parts: Parts, spec: RolloutSpec) -> None:
        self._parts = parts
        self._spec = spec
        self._tasks = asyncio.TaskGroup()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._attempts: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Cancel all groups."""
        self.cancel_all()
        await self._tasks.__aexit__(kind, error, traceback)

    def start(self, assignments: Iterable[GroupAssignment]) -> None:
        """Start groups; an attempt that was started before is left as it is."""
        for assignment in assignments:
            if self._attempts.get(assignment.group_id, 0) >= assignment.attempt:
                continue
            self.cancel([assignment.group_id])
            self._attempts[assignment.group_id] = assignment.attempt
            if len(self._attempts) > _NUM_REMEMBERED:
                del self._attempts[next(iter(self._attempts))]
            self._running[assignment.group_id] = self._tasks.create_task(
                self._run_group(assignment), name=assignment.group_id
            )

    def cancel(self, group_ids: Iterable[str]) -> None:
        """End groups without results; unknown ones are ignored."""
        for group_id in group_ids:
            task = self._running.pop(group_id, None)
            if task is not None:
                task.cancel()

    def cancel_all(self) -> None:
        """End all groups without results."""
        self.cancel(list(self._running))

    @property
    def num_groups(self) -> int:
        """Groups that are being worked on."""
        return len(self._running)

    async def _run_group(self, assignment: GroupAssignment) -> None:
        try:
            prompt = self._parts.prompts.prompt(assignment.split, assignment.row)
            samples = await self._sample_members(assignment, prompt)
            await self._parts.publisher.publish(assignment, prompt, samples)
        except GroupError as error:
            metrics.GROUPS.labels(outcome=error.reason).inc()
            logger.warning(
                "group failed", extra={"group_id": assignment.group_id, "reason": error.reason}
            )
            await self._parts.report_failure(assignment, error)
        else:
            metrics.GROUPS.labels(outcome="published").inc()
        if self._running.get(assignment.group_id) is asyncio.current_task():
            del self._running[assignment.group_id]

    async def _sample_members(self, assignment: GroupAssignment, prompt: Prompt) -> list[Sample]:
        """Sample all members at once; the first that fails for good ends the others."""
        try:
            async with asyncio.TaskGroup() as group:
                members = [
                    group.create_task(self._sample_member(assignment, prompt, member))
                    for member in range(len(assignment.seeds))
                ]
        except* GroupError as errors:
            raise _first(errors) from None
        return [member.result() for member in members]

    async def _sample_member(
        self, assignment: GroupAssignment, prompt: Prompt, member: int
    ) -> Sample:
        """Sample and score one member; after a failed reward, as often as the specification says."""
        num_tries = self._spec.max_attempts if self._spec.on_reward_failure == "regenerate" else 1
        for attempt in range(num_tries):
            episode = self._episode(assignment, prompt, member, attempt=attempt)
            await self._run_workflow(episode)
            try:
                reward = await self._score(episode)
            except RewardError as error:
                metrics.REWARD_FAILURES.labels(kind=error.kind).inc()
                failure = error
                continue
            return _sample(assignment, member, episode, reward=reward, failed=False)
        if self._spec.on_reward_failure == "mask":
            return _sample(assignment, member, episode, reward=0.0, failed=True)
        raise GroupError(f"reward_{failure.kind}", failure.message, retryable=True)

    def _episode(
        self, assignment: GroupAssignment, prompt: Prompt, member: int, *, attempt: int
    ) -> Episode:
        seed = assignment.seeds[member]
        return Episode(
            prompt,
            EpisodeLimits(
                seed=seed if attempt == 0 else _derived_seed(seed, attempt),
                temperature=assignment.temperatures[member],
                max_response_tokens=self._spec.max_response_tokens,
                stop_texts=self._spec.sampling.stop,
            ),
            engine=self._parts.engine,
            tokenizer=self._parts.tokenizer,
            request_id=f"{assignment.group_id}.{member}/{assignment.attempt}.{attempt}",
        )

    async def _run_workflow(self, episode: Episode) -> None:
        try:
            await self._parts.workflow.run(episode)
        except GroupError:
            raise
        except Exception as error:  # a workflow may be the user's code
            logger.exception("workflow failed")
            raise GroupError(
                "workflow_error", f"{type(error).__name__}: {error}", retryable=True
            ) from error

    async def _score(self, episode: Episode) -> float:
        prompt = episode.prompt
        with metrics.REWARD_SECONDS.time():
            return await self._parts.reward.score(
                RewardInput(
                    prompt=prompt.text,
                    response=episode.response_text,
                    answer=prompt.answer,
                    row=prompt.row,
                )
            )


def _sample(
    assignment: GroupAssignment, member: int, episode: Episode, *, reward: float, failed: bool
) -> Sample:
    sample = Sample(
        member=member,
        turns=tuple(episode.turns),
        reward=reward,
        finish_reason="failed" if failed else episode.finish_reason,
        is_greedy=assignment.temperatures[member] == 0,
    )
    metrics.SAMPLES.labels(finish_reason=sample.finish_reason).inc()
    metrics.RESPONSE_TOKENS.observe(len(sample.response_ids))
    metrics.SEGMENTS.observe(len(sample.sampled_versions))
    return sample


def _derived_seed(seed: int, attempt: int) -> int:
    """Another seed for another try, the same on every replica."""
    digest = hashlib.sha256(f"{seed}/{attempt}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _first(errors: BaseExceptionGroup[GroupError]) -> GroupError:
    """One error of a group of members."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, GroupError)
    return error
