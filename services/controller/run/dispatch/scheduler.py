"""Generating side of a run: dispatches prompt groups, collects their samples, handles failed groups."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from services.common.task_group import TaskGroup
from services.common.telemetry import tracing
from services.controller import metrics
from services.controller.rules.ledger import RUNNING, WAITING, Group, GroupState, Ledger
from services.controller.rules.prompts import PromptOrder
from services.controller.run.dispatch.dispatcher import Dispatcher, GenerationError
from services.controller.run.dispatch.rollout_pool import RolloutPool
from services.controller.run.dispatch.sample_index import (
    GroupSamples,
    SampleIndex,
    attempt_of,
    oldest_version,
    rewards_of,
    unfit_reason,
)
from services.controller.run.state.journal import Journal
from services.controller.run.state.requests import CurrentSpec
from services.controller.store.records import Note
from services.wire.controller import GroupFailure
from services.wire.workers import DEFERRED, GroupAssignment

logger = logging.getLogger(__name__)

# Reasons for missing samples that are not the prompt's fault.
_NOT_PROMPT_FAILURES = frozenset({"publish_failed"})
# Reasons for which a group is parked with its tokens stored.
_PARKED = frozenset({"interrupted", "stalled"})
# Reason for which dynamic sampling replaces a group.
_REFILLED = "equal_rewards"
_UNREACHABLE = "the transferqueue is unreachable"
CUT_OFF_EVERY_S = 1.0
"""Max seconds until a worker that cannot reach the transferqueue is reported, and its groups move."""
# Min seconds between two dispatches: groups that end meanwhile share one, because each waits for the disk.
_DISPATCH_PAUSE_S = 0.01


def cut_off_notes(
    cut: str, causes: Mapping[str, str], reconnected: str, back: Iterable[str]
) -> list[Note]:
    """Returns the events of workers that cannot reach the transferqueue any more, or can again.

    Args:
        cut: Type of the events of workers in ``causes``.
        causes: Workers that cannot reach it any more, with the cause; an empty cause is not known.
        reconnected: Type of the events of workers in ``back``.
        back: Workers that can reach it again.
    """
    return [
        *(Note(cut, f"{n}: {why or _UNREACHABLE}", {"workers": [n]}) for n, why in causes.items()),
        *(
            Note(reconnected, f"{name} reaches the transferqueue again", {"workers": [name]})
            for name in back
        ),
    ]


_OF_THE_ROW = frozenset({"prompt_too_long", "demonstration_too_long"})
"""Reasons that concern one row only: many rows of a data set may fail so, while the others do not."""


class GroupFailures:
    """Counts failed groups, retries their prompts or quarantines them.

    Args:
        dispatcher: Receives the text of the first failure.
    """

    def __init__(
        self,
        spec: CurrentSpec,
        *,
        ledger: Ledger,
        prompt_order: PromptOrder,
        dispatcher: Dispatcher,
    ) -> None:
        self._spec = spec
        self._ledger = ledger
        self._prompt_order = prompt_order
        self._dispatcher = dispatcher
        self._consecutive: list[str] = []

    def count_failure(self, group: Group, failure: GroupFailure) -> None:
        """Counts a failure against the group's prompt, which is retried or quarantined."""
        logger.warning(
            "group failed",
            extra={"group": failure.group_id, "reason": failure.reason, "why": failure.message},
        )
        why = f"{self._prompt_order.mixture.name(group.row)}: {failure.reason}: {failure.message}"
        if failure.reason not in _OF_THE_ROW:
            self._consecutive.append(why)
        self._dispatcher.record_failure(why)
        if not failure.retryable:
            self._ledger.quarantine(group, failure.reason)
            self._prompt_order.quarantine(group.row)
        elif not self._ledger.retry(group, failure.reason):
            self._prompt_order.quarantine(group.row)

    def reset_failures(self) -> None:
        """Resets the count of consecutive failures after a group succeeded."""
        self._consecutive.clear()

    def raise_if_all_fail(self) -> None:
        """Raises GenerationError after ``(4 + max_staleness) * prompts_per_step`` consecutive failures.

        The limit exceeds one batch, because all running groups may fail at once with an environment or a
        service that they share; they are retried. Each attempt counts, so that a reward that always fails
        ends the run early.
        """
        spec = self._spec.now
        limit = (4 + spec.algorithm.max_staleness) * spec.trainer.prompts_per_step
        if len(self._consecutive) >= limit:
            raise GenerationError(
                f"{limit} consecutive attempts to generate a group failed; the first failure: "
                f"{self._consecutive[0]}"
            )


def failed(failure: GroupFailure, row: str) -> Note:
    """Returns the event of a failed group; its message names the row, so that its owner finds it."""
    subject = failure.group_id if row in failure.message else f"{failure.group_id} ({row})"
    return Note(
        "GroupFailed",
        f"{subject}: {failure.reason}: {failure.message}",
        {"group_id": failure.group_id, "reason": failure.reason},
    )


class GenerationScheduler:
    """Dispatches prompt groups to rollouts and collects the finished ones.

    Args:
        journal: Durable record, written before a decision of the ledger takes effect.
        summary: Returns the run's progress, which a failed group changes; None without one.
    """

    def __init__(
        self,
        spec: CurrentSpec,
        *,
        ledger: Ledger,
        prompt_order: PromptOrder,
        journal: Journal,
        rollout_pool: RolloutPool,
        sample_index: SampleIndex,
        dispatcher: Dispatcher,
        summary: Callable[[], Mapping[str, Any] | None] = lambda: None,
    ) -> None:
        self._spec = spec
        self._ledger = ledger
        self._prompt_order = prompt_order
        self._journal = journal
        self._rollout_pool = rollout_pool
        self._dispatcher = dispatcher
        self._summary = summary
        self._is_reported = False
        self._failures = GroupFailures(
            spec, ledger=ledger, prompt_order=prompt_order, dispatcher=dispatcher
        )
        self._work = asyncio.Event()
        self._finished = asyncio.Condition()
        self.sample_index = sample_index
        self.gate = dispatcher.gate

    def published(self, step: int) -> None:
        """Records that all rollouts serve the weights of ``step``, which opens the staleness gate further."""
        self._dispatcher.open_gate(step)
        self._wake()

    def batch_taken(self) -> None:
        """Resets the number of groups that dynamic sampling may replace, for the next batch."""
        self._ledger.refilled_before = self._ledger.num_ended(_REFILLED)
        self._is_reported = False

    async def restore(self, lost_workers: Collection[str], *, is_queue_empty: bool) -> None:
        """Reconciles groups in flight with stored samples and live rollouts; restarts groups without either.

        Args:
            is_queue_empty: True if the transferqueue lost all stored samples.
        """
        unscored, unwanted = await self._find_stored()
        ready_groups = self._ledger.in_state(GroupState.READY)
        for group in (group for group in ready_groups if group not in self.sample_index):
            self._ledger.requeue(group)
        assignments: dict[str, list[GroupAssignment]] = defaultdict(list)
        members = range(self._spec.now.samples_per_group)
        # The assignment of shards to rollouts is not stored in the database.
        is_shared = len(members) > self._spec.now.rollout.max_running_samples
        running = self._ledger.running()
        for group in running:
            if group.group_id in unscored:
                # The rollout has finished the group, even if the rollout is gone by now.
                self._dispatcher.record_start(group, {group.worker_id: members})
                continue
            if group.worker_id in lost_workers:
                if not self._ledger.park_lost(group):
                    self._prompt_order.quarantine(group.row)
            # A rollout that finished a group before its samples were lost would not start it again.
            elif is_queue_empty or is_shared or not self._rollout_pool.has_weights(group.worker_id):
                if self._spec.now.rollout.partial_rollout:
                    # Rollouts may have cached tokens since; the next attempt resumes them with
                    # their weight versions.
                    self._ledger.interrupt(group)
                else:
                    self._ledger.requeue(group)
            else:
                # A rollout that already has the group ignores the repeated assignment.
                self._dispatcher.record_start(group, {group.worker_id: members})
                assignments[group.worker_id].append(self._dispatcher.assignment(group, members))
        await self._journal.save(self._ledger)
        await self.sample_index.delete(unwanted)
        if is_shared:
            await self._rollout_pool.cancel([group.group_id for group in running])
        await self._rollout_pool.start(assignments)

    async def dispatch_loop(self) -> None:
        """Dispatches groups until it is cancelled, whenever groups end or the gate opens."""
        async with TaskGroup() as starts:
            while True:
                self._work.clear()
                await self._dispatcher.reclaim_stalled()
                if await self._dispatcher.dispatch(starts):
                    await asyncio.sleep(_DISPATCH_PAUSE_S)
                try:
                    async with asyncio.timeout(self._dispatcher.seconds_to_next_stall()):
                        await self._work.wait()
                except TimeoutError:
                    continue

    async def collect(self) -> None:
        """Collects finished groups until it is cancelled."""
        async for groups in self.sample_index.watch_arrivals():
            await self._process_arrived(groups)

    async def replace_lost(self) -> None:
        """Restarts groups whose samples were lost with a transferqueue shard, until it is cancelled.

        Groups in training are left alone: the trainer has their samples, or reports them as lost.
        """
        async for group_ids in self.sample_index.watch_losses():
            by_group = await self.sample_index.find()
            complete = {
                name for name, samples in by_group.items() if self.sample_index.is_whole(samples)
            }
            lost_groups = [self._ledger.get(group_id) for group_id in sorted(group_ids - complete)]
            groups = [group for group in lost_groups if group is not None]
            # During the calls, these attempts may fail, or be interrupted and dispatched again.
            running = [
                (group.group_id, group.attempt) for group in groups if group.state in RUNNING
            ]
            await self._rollout_pool.cancel([group_id for group_id, _ in running])
            still = self._still_running(running)
            await self.sample_index.delete_incomplete(
                [(group.group_id, group.attempt) for group in still]
            )
            for group in self._still_running(running):
                self._dispatcher.record_end(group)
                self._ledger.requeue(group)
            await self.restart([group for group in groups if group.state is GroupState.READY])
            await self._notify()

    async def follow_cut_off(self) -> None:
        """Moves groups away from rollouts that cannot reach the transferqueue, until it is cancelled."""
        while True:
            await self.update_cut_off()
            await asyncio.sleep(CUT_OFF_EVERY_S)

    async def update_cut_off(self) -> None:
        """Reclaims groups of rollouts that cannot reach the transferqueue, and uses those that can again."""
        causes, back = self._rollout_pool.update_cut_off()
        for note in cut_off_notes("RolloutCutOff", causes, "RolloutReconnected", back):
            await self._journal.record_event(note, self._ledger)
        reclaimed = await self._dispatcher.reclaim_cut_off()
        if reclaimed:
            await self._journal.save(self._ledger)
        if reclaimed or back:
            await self._notify()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits until ``condition`` holds; it is evaluated whenever groups finish or end."""
        async with self._finished:
            await self._finished.wait_for(condition)

    async def fail(self, failures: Sequence[GroupFailure]) -> None:
        """Processes reports of groups that produced no samples: parks, retries, drops or quarantines them."""
        for failure in failures:
            group = self._running(failure)
            if group is None:
                continue
            if failure.reason in _PARKED:
                self._dispatcher.park(group, failure)
                if failure.reason == "stalled":
                    await self._note_stall(group, failure)
                continue
            # Ends the shards first: the next attempt may start as soon as the ledger ends this one.
            await self._stop_shards(group)
            if self._running(failure) is not None:
                await self._end_failed(group, failure)
        await self._journal.save(self._ledger)
        await self._notify()

    async def reclaim_from_leaving(self, names: Collection[str]) -> None:
        """Returns unfinished groups of leaving rollouts to the queue, to continue on other rollouts."""
        await self._dispatcher.reclaim_from(names)
        await self._journal.save(self._ledger)
        await self._notify()

    async def drop_stale(self, groups: Sequence[Group]) -> None:
        """Drops ready groups over the staleness bound; the gate then admits other prompts.

        Their prompts are issued once more at the end of their epoch.
        """
        self._record_dropped(groups, "stale")
        for group in groups:
            self._prompt_order.give_back(group.row)
        await self._journal.save(self._ledger)
        await self.release(groups)

    def _record_dropped(self, groups: Sequence[Group], reason: str) -> None:
        traces = self._dispatcher.traces(groups)
        tracing.record("group.settle", traces, begin_ns=time.time_ns(), outcome=reason)
        for group in groups:
            self._ledger.drop(group, reason)

    async def restart(self, groups: Sequence[Group]) -> None:
        """Deletes the samples of ready groups and generates them again."""
        for group in groups:
            self._ledger.requeue(group)
        await self._journal.save(self._ledger)
        await self.release(groups)

    async def release(self, groups: Sequence[Group]) -> None:
        """Deletes the samples of groups that ended."""
        self._wake()
        await self.sample_index.release(groups)

    async def _stop_shards(self, group: Group) -> None:
        """Ends a group on all its rollouts and deletes the samples of its finished shards."""
        if self._dispatcher.is_divided(group):
            await self._rollout_pool.cancel([group.group_id])
        while self.sample_index.members(group):  # further ones may arrive meanwhile
            await self.sample_index.discard([group])

    async def _end_failed(self, group: Group, failure: GroupFailure) -> None:
        """Retries, drops or quarantines a group that failed, and records why."""
        row = self._prompt_order.mixture.name(group.row)
        self._dispatcher.record_end(group)
        if failure.reason == DEFERRED:
            self._ledger.drop(group, DEFERRED)
            self._dispatcher.record_deferred()
        elif failure.reason in _NOT_PROMPT_FAILURES:
            self._ledger.requeue(group)
            # Reported once per batch: if the transferqueue has no room for a batch, all groups fail with
            # this reason and none becomes READY.
            is_reported, self._is_reported = self._is_reported, True
            if not is_reported:
                await self._journal.record_event(failed(failure, row), self._ledger)
        else:
            self._failures.count_failure(group, failure)
            # The run may end with this failure, before a step reports its progress.
            note = replace(failed(failure, row), summary=self._summary())
            await self._journal.record_event(note, self._ledger)
            self._failures.raise_if_all_fail()

    def _running(self, failure: GroupFailure) -> Group | None:
        """Returns the group of a failure; None unless the attempt that failed is running."""
        return next(iter(self._still_running([(failure.group_id, failure.attempt)])), None)

    def _still_running(self, attempts: Iterable[tuple[str, int]]) -> list[Group]:
        """Returns the groups of attempts, by id and number, that are running."""
        groups = [self._ledger.get(group_id, attempt) for group_id, attempt in attempts]
        return [group for group in groups if group is not None and group.state in RUNNING]

    async def _find_stored(self) -> tuple[set[str], list[GroupSamples]]:
        """Admits finished groups that the transferqueue holds.

        Returns:
            Ids of running groups whose samples are all stored but lack fields that another worker adds, and
            the samples of all groups that are not expected or may not train.
        """
        unwanted: list[GroupSamples] = []
        unscored: set[str] = set()
        for group_id, samples in (await self.sample_index.find()).items():
            group = self._ledger.get(group_id, attempt_of(samples))
            if group is None or group.state in WAITING or not self.sample_index.is_whole(samples):
                unwanted.append(samples)
                continue
            if not self.sample_index.is_scored(samples):
                unscored.add(group_id)
                continue
            if group.state not in RUNNING:
                self.sample_index.add_group(group, samples)
            elif not self._admit(group, samples):
                unwanted.append(samples)
        return unscored, unwanted

    async def _note_stall(self, group: Group, failure: GroupFailure) -> None:
        row = self._prompt_order.mixture.name(group.row)
        if group.state is GroupState.PARTIAL and not self._ledger.stall(group):
            self._prompt_order.quarantine(group.row)
        await self._journal.record_event(failed(failure, row), self._ledger)

    async def _process_arrived(self, groups: Sequence[tuple[str, GroupSamples]]) -> None:
        late: list[GroupSamples] = []
        unfit: list[GroupSamples] = []
        for group_id, samples in groups:
            group = self._ledger.get(group_id, attempt_of(samples))
            if group is not None and group in self.sample_index:
                continue
            if group is None or group.state not in RUNNING:
                logger.info("late result of a group discarded", extra={"group": group_id})
                metrics.LATE_GROUPS.inc()
                late.append(samples)
                continue
            self._failures.reset_failures()
            self._dispatcher.record_arrived(group, samples.numbers("member"))
            group_samples = self.sample_index.add(group, samples)
            if group_samples is None:
                self._dispatcher.requeue_ended(group)
                continue
            self._dispatcher.record_finished(group, group_samples.numbers("response_tokens"))
            if not self._admit(group, group_samples):
                unfit.append(group_samples)
        if unfit:
            await self._journal.save(self._ledger)
        await self.sample_index.delete([*late, *unfit])
        await self._notify()

    def _admit(self, group: Group, samples: GroupSamples) -> bool:
        """Moves a finished group to READY, or drops it if it may not train; returns False if it was dropped.

        The only way into READY: of groups that arrive, and of those that a recovery finds stored.
        """
        self._dispatcher.record_accepted()
        if (difficulty := self._prompt_order.difficulty) is not None:
            difficulty.observe(group.row, rewards_of(samples), step=self._dispatcher.published_step)
        reason = self._why_unfit(samples)
        if reason is not None:
            self._record_dropped([group], reason)
            return False
        self._ledger.complete(group, oldest_version=oldest_version(samples))
        self.sample_index.add_group(group, samples)
        return True

    def _why_unfit(self, samples: GroupSamples) -> str | None:
        algorithm = self._spec.now.algorithm
        refilled = self._ledger.num_ended(_REFILLED) - self._ledger.refilled_before
        maximum = (algorithm.max_refill_factor - 1) * self._spec.now.trainer.prompts_per_step
        return unfit_reason(
            samples,
            algorithm,
            may_refill=refilled < maximum,
            max_response_tokens=self._spec.now.rollout.max_response_tokens,
        )

    async def _notify(self) -> None:
        self._wake()
        async with self._finished:
            self._finished.notify_all()

    def _wake(self) -> None:
        self._dispatcher.note_pending()
        self._work.set()
