"""Keeps the rollouts of one run supplied with prompts and takes in what they finish.

waits for                      then
room under the staleness gate  issues the next prompts and hands them to the least loaded rollouts
a group in the transferqueue   marks it ready (or drops it and says why)
a reported failure             hands the group out again, or quarantines its prompt
a group without result         takes it from its rollout and hands it out again
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Collection, Sequence

from services.common.batch import KVBatchMeta
from services.common.clock import Clock
from services.common.fields import partition_id
from services.common.spec.run import RunSpec
from services.controller.client import GroupFailure
from services.controller.run.journal import Journal
from services.controller.run.ledger import RUNNING, WAITING, Group, GroupState, Ledger
from services.controller.run.prompts import PromptOrder, sample_seed
from services.controller.run.replay import resume_order
from services.controller.run.replicas import Replicas
from services.controller.run.staleness import StalenessGate
from services.controller.run.stored import StoredGroups, attempt_of, oldest_version, why_unfit
from services.controller.store.records import Note
from services.rollout.client import GroupAssignment

logger = logging.getLogger(__name__)
# Reasons for which a group has no samples although its prompt did nothing wrong.
_BLAMELESS = frozenset({"publish_failed"})


class GenerationError(RuntimeError):
    """Generation cannot go on; the message says why and what to do."""


class Generation:
    """The generating half of a run.

    Args:
        spec: The run's specification.
        run_id: Names its partitions.
        ledger: States of all issued groups.
        order: Order of the prompts.
        journal: Where what the ledger decides is written before it is acted on.
        replicas: Where groups go.
        stored: Where their samples arrive.
        clock: For stalls.
    """

    def __init__(
        self,
        spec: RunSpec,
        run_id: str,
        *,
        ledger: Ledger,
        order: PromptOrder,
        journal: Journal,
        replicas: Replicas,
        stored: StoredGroups,
        clock: Clock,
    ) -> None:
        self._spec = spec
        self._partition = partition_id(run_id, "train")
        self._ledger = ledger
        self._order = order
        self._journal = journal
        self._replicas = replicas
        self._clock = clock
        self._total = spec.trainer.steps * spec.trainer.prompts_per_step
        per_replica = max(1, spec.rollout.max_running_samples // spec.rollout.group_size)
        self._max_running_per_replica = per_replica
        self._published_step, self._failures_in_a_row = -1, 0
        self._work = asyncio.Event()
        self.stored = stored
        self.gate = StalenessGate(
            max_staleness=spec.algorithm.max_staleness,
            groups_per_step=spec.trainer.prompts_per_step,
        )
        self.finished = asyncio.Condition()
        """Notified whenever a group becomes ready or ends."""

    def published(self, step: int) -> None:
        """All rollouts serve the weights of ``step``: the gate opens further."""
        self._published_step = step
        self._work.set()

    async def restore(self, lost_workers: Collection[str], *, is_queue_empty: bool) -> None:
        """Find out what became of the groups in flight, and hand them out again where it is needed.

        Args:
            lost_workers: Rollouts whose work is gone.
            is_queue_empty: Whether what rollouts stored is gone.
        """
        await self._find_stored()
        ready = self._ledger.in_state(GroupState.READY)
        for group in (group for group in ready if group not in self.stored):
            self._ledger.requeue(group)
        assignments: dict[str, list[GroupAssignment]] = defaultdict(list)
        for group in self._ledger.running():
            if group.worker_id in lost_workers:
                if not self._ledger.lose(group):
                    self._order.quarantine(group.row)
                continue
            # A rollout that finished a group before its samples were lost would not start it again.
            if is_queue_empty or not self._replicas.serves(group.worker_id):
                self._ledger.requeue(group)
                continue
            # A rollout that has the group already takes this as a repetition.
            self._replicas.assigned(group.worker_id)
            assignments[group.worker_id].append(self._assignment(group))
        await self._journal.save(self._ledger)
        await self._replicas.start(assignments)

    async def supply(self) -> None:
        """Hand out groups for ever."""
        while True:
            self._work.clear()
            await self._take_back_stalled()
            await self._hand_out(self._next_groups())
            try:
                async with asyncio.timeout(self._seconds_to_next_stall()):
                    await self._work.wait()
            except TimeoutError:
                continue

    async def collect(self) -> None:
        """Take in finished groups for ever."""
        async for group_id, meta in self.stored.finished():
            await self._take_in(group_id, meta)

    async def fail(self, failures: Sequence[GroupFailure]) -> None:
        """Take in groups that brought no samples."""
        for failure in failures:
            group = self._ledger.get(failure.group_id, failure.attempt)
            if group is None or group.state not in RUNNING:
                continue
            self._replicas.finished(group.worker_id)
            if failure.reason == "interrupted":
                self._ledger.interrupt(group)
            elif failure.reason in _BLAMELESS:
                self._ledger.requeue(group)
            else:
                self._blame(group, failure)
                await self._journal.note(_failed(failure), self._ledger)
                self._check_that_some_succeed(failure)
        await self._journal.save(self._ledger)
        await self._notify()

    async def drop(self, group: Group, reason: str) -> None:
        """Give up a ready group; the gate lets another prompt in for it."""
        self._ledger.drop(group, reason)
        await self._journal.save(self._ledger)
        await self.release([group])

    async def restart(self, group: Group) -> None:
        """Throw away the samples of a ready group and generate them again."""
        self._ledger.requeue(group)
        await self._journal.save(self._ledger)
        await self.release([group])

    async def release(self, groups: Sequence[Group]) -> None:
        """Delete the samples of groups that ended."""
        self._work.set()
        await self.stored.release(groups)

    async def _find_stored(self) -> None:
        """Take in what the transferqueue holds, and delete what nobody waits for."""
        unwanted: list[str] = []
        for group_id, meta in (await self.stored.find()).items():
            group = self._ledger.get(group_id, attempt_of(meta))
            if group is None or group.state in WAITING or not self.stored.is_whole(meta):
                unwanted += meta.keys
                continue
            self.stored.keep(group, meta)
            if group.state in RUNNING:
                self._ledger.complete(group, oldest_version=oldest_version(meta))
        await self.stored.delete(unwanted)

    def _blame(self, group: Group, failure: GroupFailure) -> None:
        """Count a failure of the prompt."""
        logger.warning(
            "group failed",
            extra={"group": failure.group_id, "reason": failure.reason, "why": failure.message},
        )
        self._failures_in_a_row += 1
        if not failure.retryable:
            self._ledger.quarantine(group, failure.reason)
            self._order.quarantine(group.row)
        elif not self._ledger.retry(group, failure.reason):
            self._order.quarantine(group.row)

    def _check_that_some_succeed(self, failure: GroupFailure) -> None:
        limit = 4 * self._spec.trainer.prompts_per_step
        if self._failures_in_a_row >= limit:
            raise GenerationError(
                f"{limit} groups failed in a row, the last one with {failure.reason}: {failure.message}"
            )

    def _next_groups(self) -> list[Group]:
        groups = resume_order(
            self._ledger.waiting(), gate=self.gate, weight_version=self._replicas.newest_version()
        )
        running = len(self._ledger.running())
        free = self._max_running_per_replica * self._replicas.num_replicas - running - len(groups)
        room = self.gate.capacity(
            published=self._published_step,
            num_admitted=self._ledger.num_admitted,
            num_running=0,
            max_running=min(max(free, 0), self._total - self._ledger.num_admitted),
        )
        for _ in range(room):
            row = self._order.next_row()
            if row is None:
                raise GenerationError(
                    "every prompt of data.train is quarantined; see the GroupFailed events for the reasons"
                )
            groups.append(self._ledger.issue(row, position=self._order.position))
        return groups

    async def _hand_out(self, groups: Sequence[Group]) -> None:
        if not groups:
            return
        by_worker: dict[str, list[GroupAssignment]] = defaultdict(list)
        for group in groups:
            worker_id, version = self._replicas.choose()
            self._replicas.assigned(worker_id)
            self._ledger.lease(group, worker_id, version=version, now=self._clock.monotonic())
            by_worker[worker_id].append(self._assignment(group))
        await self._journal.save(self._ledger)
        await self._replicas.start(by_worker)
        for group in groups:
            self._ledger.confirm(group)

    def _assignment(self, group: Group) -> GroupAssignment:
        size = self._spec.rollout.group_size
        return GroupAssignment(
            group_id=group.group_id,
            attempt=group.attempt,
            split="train",
            row=group.row,
            partition_id=self._partition,
            seeds=tuple(
                sample_seed(self._spec.seed, group.sequence, member) for member in range(size)
            ),
            temperatures=(self._spec.rollout.sampling.temperature,) * size,
        )

    async def _take_in(self, group_id: str, meta: KVBatchMeta) -> None:
        group = self._ledger.get(group_id, attempt_of(meta))
        if group is not None and group in self.stored:
            return
        if group is None or group.state not in RUNNING:
            logger.info("late result of a group is not used", extra={"group": group_id})
            await self.stored.delete(list(meta.keys))
            return
        self._replicas.finished(group.worker_id)
        self._failures_in_a_row = 0
        self._ledger.complete(group, oldest_version=oldest_version(meta))
        self.stored.keep(group, meta)
        algorithm = self._spec.algorithm
        refilled = self._ledger.reasons().get("equal_rewards", 0)
        may_refill = refilled < (algorithm.max_refill_factor - 1) * self._total
        if (reason := why_unfit(meta, algorithm, may_refill=may_refill)) is not None:
            await self.drop(group, reason)
        await self._notify()

    async def _take_back_stalled(self) -> None:
        oldest = self._clock.monotonic() - self._spec.limits.stall_timeout_s
        stalled = [group for group in self._ledger.running() if group.started <= oldest]
        if not stalled:
            return
        await self._replicas.cancel([group.group_id for group in stalled])
        for group in stalled:
            self._replicas.finished(group.worker_id)
            if not self._ledger.retry(group, "stalled"):
                self._order.quarantine(group.row)
        await self._journal.save(self._ledger)

    def _seconds_to_next_stall(self) -> float | None:
        running = self._ledger.running()
        if not running:
            return None
        oldest = min(group.started for group in running)
        return max(oldest + self._spec.limits.stall_timeout_s - self._clock.monotonic(), 0.01)

    async def _notify(self) -> None:
        self._work.set()
        async with self.finished:
            self.finished.notify_all()


def _failed(failure: GroupFailure) -> Note:
    return Note(
        "GroupFailed",
        f"{failure.group_id}: {failure.reason}: {failure.message}",
        {"group_id": failure.group_id, "reason": failure.reason},
    )
