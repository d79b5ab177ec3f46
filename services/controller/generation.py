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
from collections.abc import Iterable, Sequence

from services.common.batch import KVBatchMeta
from services.common.clock import Clock
from services.common.errors import ServiceError
from services.common.fields import partition_id
from services.common.spec.run import RunSpec
from services.controller.client import GroupFailure
from services.controller.ledger import Group, GroupState, Ledger
from services.controller.prompts import PromptOrder, sample_seed
from services.controller.replicas import Replicas
from services.controller.staleness import StalenessGate
from services.rollout.client import GroupAssignment
from services.transferqueue.client import TransferQueueClient

logger = logging.getLogger(__name__)


class GenerationError(RuntimeError):
    """Generation cannot go on; the message says why and what to do."""


class Generation:
    """The generating half of a run.

    Args:
        spec: The run's specification.
        run_id: Names its partitions.
        ledger: States of all issued groups.
        order: Order of the prompts.
        replicas: Where groups go.
        queue: Where their samples arrive.
        clock: For stalls.
    """

    def __init__(
        self,
        spec: RunSpec,
        run_id: str,
        *,
        ledger: Ledger,
        order: PromptOrder,
        replicas: Replicas,
        queue: TransferQueueClient,
        clock: Clock,
    ) -> None:
        self._spec = spec
        self._partition = partition_id(run_id, "train")
        self._ledger = ledger
        self._order = order
        self._replicas = replicas
        self._queue = queue
        self._clock = clock
        self._gate = StalenessGate(
            max_staleness=spec.algorithm.max_staleness,
            groups_per_step=spec.trainer.prompts_per_step,
        )
        self._total = spec.trainer.steps * spec.trainer.prompts_per_step
        per_replica = max(1, spec.rollout.max_running_samples // spec.rollout.group_size)
        self._max_running_per_replica = per_replica
        self._published = -1
        self._failures_in_a_row = 0
        self._metas: dict[str, KVBatchMeta] = {}
        self._work = asyncio.Event()
        self.finished = asyncio.Condition()
        """Notified whenever a group becomes ready or ends."""

    @property
    def gate(self) -> StalenessGate:
        """The staleness bound."""
        return self._gate

    def published(self, version: int) -> None:
        """All rollouts serve ``version``: the gate opens further."""
        self._published = version
        self._work.set()

    def meta(self, groups: Iterable[Group]) -> KVBatchMeta:
        """The stored samples of ready groups, in order."""
        return KVBatchMeta.concat([self._metas[group.group_id] for group in groups])

    async def release(self, groups: Sequence[Group]) -> None:
        """Delete the samples of groups that ended."""
        keys = [key for group in groups for key in self._metas.pop(group.group_id).keys]
        self._work.set()
        await self._queue.release(self._partition, keys)

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
        members: dict[str, list[KVBatchMeta]] = defaultdict(list)
        async for batch in self._queue.watch(self._partition, 0):
            for group_id, indexes in _by_group(batch).items():
                members[group_id].append(batch.select(indexes))
                meta = KVBatchMeta.concat(members[group_id])
                if meta.num_keys == self._spec.rollout.group_size:
                    del members[group_id]
                    await self._take_in(group_id, meta)

    async def fail(self, failures: Sequence[GroupFailure]) -> None:
        """Take in groups that brought no samples."""
        for failure in failures:
            group = self._ledger.get(failure.group_id, failure.attempt)
            if group is None or group.state not in (GroupState.LEASED, GroupState.GENERATING):
                continue
            logger.warning(
                "group failed",
                extra={"group": failure.group_id, "reason": failure.reason, "why": failure.message},
            )
            self._replicas.finished(group.worker_id)
            self._failures_in_a_row += 1
            if not failure.retryable:
                self._ledger.quarantine(group, failure.reason)
                self._order.quarantine(group.row)
            elif not self._ledger.retry(group, failure.reason):
                self._order.quarantine(group.row)
            self._check_that_some_succeed(failure)
        await self._notify()

    async def drop(self, group: Group, reason: str) -> None:
        """Give up a ready group; the gate lets another prompt in for it."""
        self._ledger.drop(group, reason)
        await self.release([group])

    async def restart(self, group: Group, reason: str) -> None:
        """Throw away the samples of a ready group and generate them again."""
        if self._ledger.retry(group, reason):
            await self.release([group])

    def _check_that_some_succeed(self, failure: GroupFailure) -> None:
        limit = 4 * self._spec.trainer.prompts_per_step
        if self._failures_in_a_row >= limit:
            raise GenerationError(
                f"{limit} groups failed in a row, the last one with {failure.reason}: {failure.message}"
            )

    def _next_groups(self) -> list[Group]:
        groups = self._ledger.in_state(GroupState.PENDING)
        running = len(self._ledger.running())
        free = self._max_running_per_replica * self._replicas.num_replicas - running - len(groups)
        room = self._gate.capacity(
            published=self._published,
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
            groups.append(self._ledger.issue(row))
        return groups

    async def _hand_out(self, groups: Sequence[Group]) -> None:
        by_worker: dict[str, list[GroupAssignment]] = defaultdict(list)
        for group in groups:
            worker_id, version = self._replicas.choose()
            self._replicas.assigned(worker_id)
            self._ledger.lease(group, worker_id, version=version, now=self._clock.monotonic())
            by_worker[worker_id].append(self._assignment(group))
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
        group = self._ledger.get(group_id, int(meta.tag("attempt")[0]))
        if group is None or group.state not in (GroupState.LEASED, GroupState.GENERATING):
            logger.info("late result of a group is not used", extra={"group": group_id})
            await self._queue.release(self._partition, list(meta.keys))
            return
        self._replicas.finished(group.worker_id)
        self._failures_in_a_row = 0
        self._ledger.complete(group, oldest_version=min(int(v) for v in meta.tag("v_min")))
        self._metas[group_id] = meta
        if (reason := self._unfit(meta)) is not None:
            await self.drop(group, reason)
        await self._notify()

    def _unfit(self, meta: KVBatchMeta) -> str | None:
        """Why a finished group is not worth training, or None."""
        rewards = [
            reward
            for reward, finish in zip(
                _floats(meta, "reward"), meta.tag("finish_reason"), strict=True
            )
            if finish != "failed"
        ]
        algorithm = self._spec.algorithm
        if len(rewards) < algorithm.min_group_size:
            return "too_few_members"
        refilled = self._ledger.reasons().get("equal_rewards", 0)
        budget = (algorithm.max_refill_factor - 1) * self._total
        if algorithm.dynamic_sampling and max(rewards) - min(rewards) <= 1e-9 and refilled < budget:
            return "equal_rewards"
        return None

    async def _take_back_stalled(self) -> None:
        oldest = self._clock.monotonic() - self._spec.limits.stall_timeout_s
        stalled = [group for group in self._ledger.running() if group.started <= oldest]
        if not stalled:
            return
        try:
            await self._replicas.cancel([group.group_id for group in stalled])
        except* ServiceError as errors:
            logger.warning("a rollout did not answer a cancel", extra={"why": str(errors)})
        for group in stalled:
            self._replicas.finished(group.worker_id)
            if not self._ledger.retry(group, "stalled"):
                self._order.quarantine(group.row)

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


def _by_group(batch: KVBatchMeta) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for index, group_id in enumerate(batch.tag("group_id")):
        groups[str(group_id)].append(index)
    return groups


def _floats(meta: KVBatchMeta, name: str) -> list[float]:
    return [float(value) for value in meta.tag(name)]
