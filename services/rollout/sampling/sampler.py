"""Runs assigned prompt groups from assignment to publication, with interruption and checkpoints.

::

    start      -> load cached progress -> RunningGroup samples and scores -> publish
                                                                         or -> report failure
    interrupt  -> abort in the engine, keep tokens -> cache progress -> report "interrupted"
    checkpoint -> cache progress while generation continues, so that a crash loses little
"""

import asyncio
import logging
import math
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from typing import Any, Protocol, Self

from services.common.errors import UnavailableError
from services.common.fields import run_of
from services.common.runspec.data import kind_of
from services.common.runspec.rollout import RolloutSpec
from services.common.task_group import TaskGroup
from services.common.telemetry import tracing
from services.rollout import metrics
from services.rollout.data.prompts import Prompt, PromptStore
from services.rollout.engines.base import GenerationResult
from services.rollout.failures import GroupError, InterruptedGroupError
from services.rollout.sampling.group import GroupServices, RunningGroup
from services.rollout.sampling.progress_cache import GroupProgress
from services.rollout.sampling.sample import Sample
from services.wire.workers import DEFERRED, GroupAssignment

_CROWDED_KV = 0.95
_SLOW_PUBLISH_S = 2.0
_DECREASE = 0.5


class Admission:
    """Limits concurrent groups by the load of the KV cache and the transferqueue.

    Args:
        maximum: The limit without load.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self.limit = maximum
        self._num_admitted = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Waits until the limit allows another group, which counts while the block runs."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_admitted < self.limit)
            self._num_admitted += 1
        try:
            yield
        finally:
            self._num_admitted -= 1
            async with self._changed:
                self._changed.notify()

    async def adapt(self, *, kv_used_fraction: float, publish_wait_s: float) -> None:
        """Lowers or raises the limit; to be called at regular intervals.

        Args:
            kv_used_fraction: Fraction of the KV cache in use, 0 to 1.
            publish_wait_s: Age of the oldest unfinished publication.
        """
        if kv_used_fraction >= _CROWDED_KV or publish_wait_s >= _SLOW_PUBLISH_S:
            # Start from the groups that run, not from a limit that was never reached.
            self.limit = max(1, int(min(self.limit, self._num_admitted) * _DECREASE))
        elif self.limit < self._maximum:
            self.limit += 1
        async with self._changed:
            self._changed.notify_all()


logger = logging.getLogger(__name__)

_NUM_REMEMBERED = 8_192
"""Max groups whose attempts are remembered, so that a repeated request does not start them again."""

_CHECKPOINT_SHARE = 0.02
"""Max fraction of time spent on checkpoints of running groups."""


class Publisher(Protocol):
    """Makes finished groups visible to the trainer."""

    async def publish(
        self, assignment: GroupAssignment, prompt: Prompt, samples: list[Sample]
    ) -> None:
        """Stores a group. Raises GroupError if it cannot be stored."""


class ProgressCache(Protocol):
    """Stores the progress of unfinished groups where every replica can read it."""

    async def load(self, first_attempts: Mapping[str, int]) -> Mapping[str, GroupProgress]:
        """Returns the newest progress of the groups that have any.

        Args:
            first_attempts: By group, the first attempt whose progress may be resumed.
        """

    async def save(
        self, groups: Mapping[str, GroupProgress], attempts: Mapping[str, int], *, is_last: bool
    ) -> None:
        """Replaces stored progress. Raises GroupError if it cannot be stored.

        Args:
            is_last: True if this replica stops working on the groups after this call.
        """

    async def delete_progress(self, group_id: str, members: Collection[int]) -> None:
        """Deletes the stored progress of members of a group, if there is any."""


Failure = tuple[GroupAssignment, GroupError]
ReportFailures = Callable[[Sequence[Failure]], Awaitable[None]]
"""Reports groups that ended without samples to the controller."""


class EpisodeWatch:
    """Detects stalled members of groups from progress marks, which the caller samples periodically.

    Args:
        deadline_s: Max time in which a member generates no token and makes no call; may be changed.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._marks: dict[tuple[str, int], tuple[int, float]] = {}

    def find_stalled(
        self, groups: Mapping[str, Mapping[int, int]], *, now: float
    ) -> dict[str, str]:
        """Returns the groups that stalled, each with the reason.

        Args:
            groups: By group and member, a number that changes with each token and call.
            now: Monotonic seconds.
        """
        last_marks: dict[tuple[str, int], tuple[int, float]] = {}
        stalled: dict[str, str] = {}
        for group_id, marks in groups.items():
            for member, mark in marks.items():
                before, since = self._marks.get((group_id, member), (mark, now))
                last_marks[group_id, member] = (mark, since if before == mark else now)
                if before == mark and now - since > self.deadline_s:
                    stalled[group_id] = (
                        f"member {member} generated no token and made no call for {now - since:.0f} s; check "
                        "what its workflow waits for, or raise limits.stall_timeout_s"
                    )
        self._marks = last_marks
        return stalled


class GroupSampler:
    """Runs groups concurrently; the engine's queue decides which samples are decoded first.

    A group ends in exactly one way: it is published, reported as failed or interrupted, or cancelled by the
    controller. An unexpected exception in a group cancels the task that entered the sampler.
    """

    def __init__(
        self,
        prompts: PromptStore,
        services: GroupServices,
        spec: RolloutSpec,
        *,
        publisher: Publisher,
        cache: ProgressCache,
        report_failures: ReportFailures,
    ) -> None:
        """Initializes a sampler without groups.

        Args:
            report_failures: Reports groups without samples to the controller.
        """
        self._prompts = prompts
        self._services = services
        self._spec = spec
        self._publisher = publisher
        self._cache = cache
        self._report_failures = report_failures
        # Validation groups have one or two samples. More groups than twice the slots would only wait.
        self.admission = Admission(2 * spec.max_running_samples)
        self._tasks = TaskGroup()
        self._is_ending = False
        self._running: dict[str, asyncio.Task[None]] = {}
        self._groups: dict[str, RunningGroup] = {}
        self._attempts: dict[str, int] = {}
        self._caching = asyncio.Lock()
        self._next_checkpoint = -math.inf
        self._parked: list[RunningGroup] = []

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        self.cancel_all()
        await self._tasks.__aexit__(*error)

    @property
    def num_groups(self) -> int:
        return len(self._running)

    def num_prompts(self) -> dict[str, int]:
        """Returns the number of rows of each set, by split."""
        return {split: self._prompts.num_rows(split) for split in self._prompts.splits}

    def start(self, assignments: Iterable[GroupAssignment]) -> None:
        """Starts groups; ignores an assignment whose attempt, or a later one, was started before.

        Raises:
            UnavailableError: If this replica is shutting down.
        """
        if self._is_ending:
            raise UnavailableError("this replica is shutting down and accepts no groups")
        new = [a for a in assignments if self._attempts.get(a.group_id, 0) < a.attempt]
        loading = self._load_progress(new)
        for assignment in new:
            group_id = assignment.group_id
            self.cancel([group_id])
            self._remember(assignment)
            group = self._groups[group_id] = RunningGroup(assignment, self._services, self._spec)
            self._running[group_id] = self._tasks.create_task(
                self._run_group(group, loading), name=group_id
            )

    def _remember(self, assignment: GroupAssignment) -> None:
        """Records that an attempt was started; forgets the oldest groups that have ended."""
        self._attempts[assignment.group_id] = assignment.attempt
        while len(self._attempts) - len(self._running) > _NUM_REMEMBERED:
            oldest = next(iter(self._attempts))
            attempt = self._attempts.pop(oldest)
            if oldest in self._running:
                self._attempts[oldest] = attempt

    def refuse(self) -> None:
        self._is_ending = True

    def cancel(self, group_ids: Iterable[str]) -> None:
        """Ends groups without results; ignores unknown ids."""
        for group_id in group_ids:
            task = self._running.pop(group_id, None)
            self._groups.pop(group_id, None)
            if task is not None:
                task.cancel()

    def cancel_all(self) -> None:
        """Ends all groups without results."""
        self.cancel(list(self._running))

    async def interrupt(self, group_ids: Iterable[str] | None = None) -> None:
        """Stops groups (None: all), caches their progress and reports them as ``interrupted``.

        No token is lost: any replica that receives the next attempt continues from the cached progress.
        """
        names = [*self._running] if group_ids is None else [*group_ids]
        tasks = {name: self._running[name] for name in names if name in self._running}
        groups = [self._groups[name] for name in tasks]
        requests = {request for group in groups for request in group.interrupt()}
        if not tasks:
            return
        await self._services.engine.abort(requests)
        await asyncio.wait(tasks.values())
        await self._park([group for group in groups if group.is_cut])

    async def sleep(self) -> None:
        """Releases the engine's GPU memory; first finishes running requests unless partial rollout is on."""
        # The shield completes the memory transfer even if the caller is cancelled.
        await asyncio.shield(self._tasks.create_task(self._sleep()))

    async def wake(self) -> None:
        """Reclaims the engine's GPU memory."""
        await asyncio.shield(self._tasks.create_task(self._services.engine.wake()))

    async def _sleep(self) -> None:
        engine = self._services.engine
        if not self._spec.partial_rollout and not engine.stats().is_asleep:
            await engine.pause(drain=True)
        await engine.sleep()

    async def stop_stalled(self, watch: EpisodeWatch, *, now: float) -> None:
        """Interrupts groups with a member that generated no token and made no call within the deadline."""
        running = await self._services.engine.peek()
        total = self._services.engine.stats().tokens_total
        marks = {name: group.marks(running, total) for name, group in self._groups.items()}
        stalled = watch.find_stalled(marks, now=now)
        for name, why in stalled.items():
            self._groups[name].stalled = why
        if stalled:
            await self.interrupt(stalled)

    async def checkpoint(self) -> None:
        """Caches the progress of all running groups while they continue."""
        async with self._caching:
            now = asyncio.get_running_loop().time
            begin = now()
            running = await self._services.engine.peek()
            await self._save(list(self._groups.values()), running, is_last=False)
            self._next_checkpoint = begin + (now() - begin) / _CHECKPOINT_SHARE

    def checkpoint_soon(self) -> None:
        """Starts a checkpoint in the background, unless the last one is too recent for its duration.

        Does nothing without partial rollout, since responses may then not continue on another replica.
        """
        now = asyncio.get_running_loop().time()
        if self._spec.partial_rollout and now >= self._next_checkpoint:
            self._next_checkpoint = math.inf
            self._tasks.create_task(self.checkpoint())

    async def _park(self, groups: Sequence[RunningGroup]) -> None:
        """Caches the progress of groups and returns them to the controller.

        Groups that arrive while a save runs are parked together in the next save.
        """
        self._parked += groups
        async with self._caching:
            parked, self._parked = self._parked, []
            if not parked:
                return
            await self._save(parked, {}, is_last=True)
            metrics.GROUPS.labels(outcome="interrupted").inc(len(parked))
            await self._report_failures(
                [(group.assignment, _interruption(group)) for group in parked]
            )

    async def _save(
        self,
        groups: Sequence[RunningGroup],
        running: Mapping[str, GenerationResult],
        *,
        is_last: bool,
    ) -> None:
        """Caches progress. A failure is only logged: after a crash the groups start from the beginning."""
        progress = {group.assignment.group_id: group.progress(running) for group in groups}
        attempts = {group.assignment.group_id: group.assignment.attempt for group in groups}
        unsaved = {group_id: members for group_id, members in progress.items() if members}
        if not unsaved:
            return
        try:
            await self._cache.save(unsaved, attempts, is_last=is_last)
        except GroupError as error:
            metrics.CACHE_FAILURES.inc()
            logger.warning("caching progress failed", extra={"why": error.message})

    def _end(self, group: RunningGroup) -> None:
        """Removes a group unless a newer attempt replaced it."""
        group_id = group.assignment.group_id
        if self._groups.get(group_id) is group:
            del self._running[group_id], self._groups[group_id]

    def _load_progress(
        self, assignments: Sequence[GroupAssignment]
    ) -> "asyncio.Task[Mapping[str, GroupProgress]] | None":
        """Starts one read of the cached progress of all these groups; returns None if no group needs it."""
        if not self._spec.partial_rollout:
            return None
        # Includes groups that start over: the cache then knows the serials of the rows that it replaces.
        again = {a.group_id: a.first_attempt for a in assignments if a.attempt > 1}
        return self._tasks.create_task(self._cache.load(again)) if again else None

    async def _run_group(
        self, group: RunningGroup, loading: "asyncio.Task[Mapping[str, GroupProgress]] | None"
    ) -> None:
        assignment = group.assignment
        trace = tracing.of_group(run_of(assignment.partition_id), assignment.group_id)
        # The controller starts the traces of training groups; those of held-out groups start here.
        is_first = kind_of(assignment.split) == "heldout"
        with tracing.span("rollout.group", trace, is_first=is_first, attempt=assignment.attempt):
            await self._make_group(group, loading)

    async def _make_group(
        self, group: RunningGroup, loading: "asyncio.Task[Mapping[str, GroupProgress]] | None"
    ) -> None:
        assignment = group.assignment
        group_id = assignment.group_id
        try:
            prompt = await self._prompts.read(assignment.split, assignment.row)
            if assignment.tried is not None and self._services.curriculum is not None:
                await self._services.curriculum.check(prompt.row, assignment.tried)
            # The shield keeps the shared read alive for the other groups if this group is cancelled.
            loaded = await asyncio.shield(loading) if loading is not None else {}
            progress = loaded.get(group_id, {})
            async with self.admission.admitted():
                samples = await group.sample(prompt, progress)
                if not group.is_cut:
                    await self._publisher.publish(assignment, prompt, samples)
                    metrics.GROUPS.labels(outcome="published").inc()
            self._end(group)
            if group.is_cut and not group.is_interrupted:
                await self._park([group])
        except GroupError as error:
            metrics.GROUPS.labels(outcome=error.reason).inc()
            level = logging.DEBUG if error.reason == DEFERRED else logging.WARNING
            logger.log(level, "group failed", extra={"group_id": group_id, "reason": error.reason})
            await self._report_failures([(assignment, error)])
        self._end(group)
        if self._spec.partial_rollout and not group.is_cut:
            async with self._caching:
                await self._cache.delete_progress(group_id, assignment.members)


def _interruption(group: RunningGroup) -> InterruptedGroupError:
    """Returns the report of an interrupted group. The controller resumes the nearly finished ones first."""
    members = group.progress({}).values()
    return InterruptedGroupError(
        stalled=group.stalled,
        num_unfinished=len(group.assignment.seeds) - sum(m.score is not None for m in members),
        num_tokens=sum(len(turn.token_ids) for m in members for turn in m.turns),
    )
