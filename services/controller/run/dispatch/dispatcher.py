"""Dispatches prompt groups to rollouts under the staleness gate.

Parked groups with tokens continue first, then restarted groups, then new prompts. The scheduler, which
collects their samples and failures, reports what happened to groups by calls and writes no field.
"""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from services.common.fields import partition_id
from services.common.host import Clock
from services.common.task_group import TaskGroup
from services.common.telemetry import tracing
from services.controller import metrics
from services.controller.rules.ledger import RUNNING, Group, GroupState, Ledger
from services.controller.rules.placement import GroupShards, SlotUsage, split
from services.controller.rules.prompts import PromptOrder, sample_seed
from services.controller.rules.staleness import StalenessGate, resume_order
from services.controller.run.dispatch.rollout_pool import RolloutPool
from services.controller.run.dispatch.sample_index import SampleIndex
from services.controller.run.state.journal import Journal
from services.controller.run.state.requests import CurrentSpec
from services.controller.store.records import Note
from services.wire.batch import pick
from services.wire.controller import GroupFailure
from services.wire.workers import GroupAssignment, PromptHistory

logger = logging.getLogger(__name__)
# Max consecutive prompts that the curriculum's function may postpone; the next one is dispatched
# without a call.
_MAX_DEFERRED = 1000


class GenerationError(RuntimeError):
    """Raised if generation cannot continue; the message names the cause and a remedy."""


class Dispatcher:
    """Chooses which groups start next and on which rollouts.

    Args:
        run_id: Identifier of the run; names its partitions.
        journal: Durable record, written before a decision of the ledger takes effect.
    """

    def __init__(
        self,
        spec: CurrentSpec,
        run_id: str,
        *,
        ledger: Ledger,
        prompt_order: PromptOrder,
        journal: Journal,
        rollout_pool: RolloutPool,
        sample_index: SampleIndex,
        clock: Clock,
    ) -> None:
        self._spec = spec
        self._run_id = run_id
        self._partition = partition_id(run_id, "train")
        self._ledger = ledger
        self._prompt_order = prompt_order
        self._journal = journal
        self._rollout_pool = rollout_pool
        self._sample_index = sample_index
        self._clock = clock
        # The ledger does not count groups of steps up to the checkpoint that the run starts from.
        num_steps = spec.num_steps - ledger.first_step
        self._total = num_steps * spec.now.trainer.prompts_per_step
        self.slot_usage = SlotUsage(
            spec.now.rollout.max_running_samples, spec.now.samples_per_group
        )
        """Estimate of how many groups may run at once, updated with each finished group."""
        self._due: float | None = None
        # ReMax uses one greedy response as its baseline.
        num_greedy = spec.now.samples_per_group - spec.now.rollout.group_size
        sampled = (spec.now.rollout.sampling.temperature,) * spec.now.rollout.group_size
        self._temperatures = sampled + (0.0,) * num_greedy
        self.shards = GroupShards()
        """Members of each group by rollout."""
        self.first_failure = ""
        """Prompt and cause of the first failure, for error messages."""
        self.num_deferred = 0
        """Consecutive prompts that the curriculum's function postponed."""
        self.published_step = -1
        """Newest step whose weights every rollout serves; -1 before the first."""
        self.gate = StalenessGate(
            max_staleness=spec.now.algorithm.max_staleness,
            groups_per_step=spec.now.trainer.prompts_per_step,
        )

    def open_gate(self, step: int) -> None:
        """Records that every rollout serves the weights of ``step``, or newer ones."""
        self.published_step = max(self.published_step, step)

    def record_failure(self, why: str) -> None:
        """Records prompt and cause of a failure; error messages name the first one."""
        self.first_failure = self.first_failure or why

    def record_deferred(self) -> None:
        """Records that the curriculum's function postponed a prompt."""
        self.num_deferred += 1

    def record_accepted(self) -> None:
        """Records that the curriculum's function accepted a prompt, or was not asked."""
        self.num_deferred = 0

    def note_pending(self) -> None:
        """Records that groups may start; the dispatch latency is measured from the first call."""
        if self._due is None:
            self._due = self._clock.monotonic()

    async def dispatch(self, starts: TaskGroup) -> int:
        """Chooses all groups that may start now, records them, and starts them in the background.

        Args:
            starts: Task group that owns the start calls, so that a slow rollout does not delay
                others.

        Returns:
            Number of dispatched groups.
        """
        begin, begin_ns = self._due or self._clock.monotonic(), time.time_ns()
        self._due = None
        self._rollout_pool.detach_ending()
        groups = self._next_groups()
        if not groups:
            return 0
        # Stored samples of restarted groups would collide with their new samples.
        await self._sample_index.discard(g for g in groups if g.state is GroupState.PENDING)
        by_worker: dict[str, list[GroupAssignment]] = defaultdict(list)
        for group in groups:
            shards, version = self._assign_shards(group)
            first = next(iter(shards))
            self._ledger.lease(group, first, version=version, now=self._clock.monotonic())
            self.record_start(group, shards)
            for worker_id, members in shards.items():
                by_worker[worker_id].append(self.assignment(group, members))
        await self._journal.save(self._ledger)
        starts.create_task(self._start(groups, by_worker, begin=begin, begin_ns=begin_ns))
        return len(groups)

    async def _start(
        self,
        groups: Sequence[Group],
        by_worker: Mapping[str, list[GroupAssignment]],
        *,
        begin: float,
        begin_ns: int,
    ) -> None:
        """Sends the assignments to the rollouts and confirms the groups."""

        async def start(worker_id: str, assignments: list[GroupAssignment]) -> None:
            await self._rollout_pool.start({worker_id: assignments})
            metrics.observe_dispatch(
                self._run_id, len(assignments), self._clock.monotonic() - begin
            )

        async with TaskGroup() as tasks:
            for item in by_worker.items():
                tasks.create_task(start(*item))
        for group in groups:
            self._ledger.confirm(group)
        # Groups of later attempts have a trace already.
        new = self.traces(group for group in groups if group.attempt == 1)
        tracing.record("group.issue", new, begin_ns=begin_ns, is_first=True, run=self._run_id)

    def traces(self, groups: Iterable[Group]) -> list[tracing.Trace]:
        """Returns the traces of groups whose spans are collected."""
        return tracing.of_groups(self._run_id, (group.group_id for group in groups))

    def record_start(self, group: Group, shards: Mapping[str, Sequence[int]]) -> None:
        """Records which rollouts generate which members of a group."""
        self.shards.add(group.group_id, shards)
        for worker_id in shards:
            self._rollout_pool.assigned(worker_id)

    def record_end(self, group: Group) -> list[str]:
        """Records that no rollout works on a group any more; returns the rollouts that did."""
        workers = self.shards.remove(group.group_id)
        for worker_id in workers:
            self._rollout_pool.finished(worker_id)
        return workers

    def is_divided(self, group: Group) -> bool:
        """Returns True if several rollouts work on a group."""
        return len(self.shards.workers(group.group_id)) > 1

    def record_arrived(self, group: Group, members: Sequence[int]) -> None:
        """Records that samples of a group are stored, which ends the shards that they complete."""
        for worker_id in self.shards.record_arrived(group.group_id, members):
            self._rollout_pool.finished(worker_id)

    def record_finished(self, group: Group, response_tokens: Sequence[int]) -> None:
        """Records that all samples of a group are stored, with the lengths of their responses."""
        self.record_end(group)
        self.slot_usage.finished(response_tokens)

    def park(self, group: Group, failure: GroupFailure) -> None:
        """Records that a rollout parked its shard of a group with its tokens stored."""
        if failure.worker_id not in self.shards.workers(group.group_id):
            return
        self._rollout_pool.finished(failure.worker_id)
        group.worker_id = failure.worker_id
        self.shards.park(
            group.group_id,
            failure.worker_id,
            num_unfinished=failure.num_unfinished,
            num_tokens=failure.num_tokens,
        )
        self.requeue_ended(group)

    def requeue_ended(self, group: Group) -> None:
        """Queues an incomplete group for its next attempt once all its shards have ended."""
        if not self.shards.workers(group.group_id):
            num_unfinished, num_tokens = self.shards.progress(group.group_id)
            self._ledger.interrupt(group, num_unfinished=num_unfinished, num_tokens=num_tokens)
            self.record_end(group)

    async def reclaim_stalled(self) -> None:
        """Parks groups on rollouts that generate no token, so that other rollouts continue them.

        Rollouts detect stalled episodes themselves; this catches a rollout that fails to.
        """
        now, patience_s = self._clock.monotonic(), self._patience_s()
        stalled: dict[str, Group] = {}
        for group in self._ledger.running():
            workers = self.shards.workers(group.group_id)
            moved_at = [self._rollout_pool.moved_at(name, now=now) for name in workers]
            if now - max([group.started, *moved_at]) >= patience_s:
                stalled[group.group_id] = group
        if not stalled:
            return
        await self._rollout_pool.park_groups([*stalled])
        running_groups = [group for group in stalled.values() if group.state in RUNNING]
        attempts = [(group.group_id, group.attempt) for group in running_groups]
        for group in running_groups:
            self.record_end(group)
            # Stored tokens keep their weight versions.
            self._ledger.interrupt(group)
            if not self._ledger.stall(group):
                self._prompt_order.quarantine(group.row)
        names = ", ".join(stalled)
        message = f"reclaimed from rollouts that generated no token for {patience_s:.0f} s: {names}"
        data = {"groups": [*stalled], "reason": "stalled"}
        await self._journal.record_event(Note("GroupsReclaimed", message, data), self._ledger)
        await self._sample_index.delete_incomplete(attempts)

    async def reclaim_from(self, names: Collection[str]) -> None:
        """Parks groups of leaving rollouts, so that other rollouts continue them from stored tokens.

        The leaving rollouts receive no further groups.
        """
        self._rollout_pool.detach(names)
        groups = self._groups_on(names)
        if self._spec.now.rollout.partial_rollout and groups:
            await self._rollout_pool.park_groups([*groups])
        cancelled = await self._cancel_on(names)
        logger.info(
            "removing rollouts", extra={"rollouts": str([*names]), "reclaimed": len(cancelled)}
        )

    async def reclaim_cut_off(self) -> list[Group]:
        """Reclaims groups of rollouts that cannot reach the transferqueue, if there are other rollouts.

        Otherwise the groups stay where they are: they lose nothing if their rollouts reach the
        transferqueue again.
        """
        names = self._rollout_pool.cut_off
        if not self._rollout_pool.num_replicas or not self._groups_on(names):
            return []
        cancelled = await self._cancel_on(names)
        for group in cancelled:
            group.worker_id = ""
        return cancelled

    def _groups_on(self, names: Collection[str]) -> dict[str, Group]:
        return {
            group.group_id: group
            for group in self._ledger.running()
            if not {*names}.isdisjoint(self.shards.workers(group.group_id))
        }

    async def _cancel_on(self, names: Collection[str]) -> list[Group]:
        """Cancels the unfinished groups of rollouts, to continue from stored tokens; returns them."""
        # Groups that finished meanwhile are stored and will be collected.
        by_group = await self._sample_index.find()
        complete = {
            name for name, samples in by_group.items() if self._sample_index.is_whole(samples)
        }
        if unfinished := [name for name in self._groups_on(names) if name not in complete]:
            await self._rollout_pool.cancel(unfinished)
        cancelled = [
            group for name, group in self._groups_on(names).items() if name not in complete
        ]
        attempts = [(group.group_id, group.attempt) for group in cancelled]
        for group in cancelled:
            self.record_end(group)
            self._ledger.interrupt(group)
        await self._sample_index.delete_incomplete(attempts)
        return cancelled

    def seconds_to_next_stall(self) -> float | None:
        """Returns the seconds until the next check for stalled groups; None if no group is running."""
        return self._patience_s() / 8 if self._ledger.count(*RUNNING) else None

    def _patience_s(self) -> float:
        # Rollouts detect their own stalls first. Colocated rollouts generate no token while a step
        # is trained.
        spec = self._spec.now
        asleep_s = spec.limits.step_timeout_s if spec.topology.is_colocated else 0.0
        return 2 * spec.limits.stall_timeout_s + asleep_s

    def assignment(self, group: Group, members: Sequence[int]) -> GroupAssignment:
        split, row = self._prompt_order.mixture.place(group.row)
        return GroupAssignment(
            group_id=group.group_id,
            attempt=group.attempt,
            split=split,
            row=row,
            partition_id=self._partition,
            members=tuple(members),
            seeds=tuple(
                sample_seed(self._spec.now.seed, group.sequence, member, failures=group.failures)
                for member in members
            ),
            temperatures=pick(self._temperatures, members),
            first_attempt=group.first_attempt,
            tried=self._tried(group),
        )

    def _tried(self, group: Group) -> PromptHistory | None:
        """Returns the prompt's history for the curriculum's function; None if it is not called."""
        curriculum, difficulty = self._spec.now.data.curriculum, self._prompt_order.difficulty
        if curriculum is None or curriculum.function is None or difficulty is None:
            return None
        maximum = min(self._prompt_order.mixture.num_rows, _MAX_DEFERRED)
        # A group that was interrupted or lost was accepted before and may have tokens.
        if group.attempt > 1 + group.failures or self.num_deferred >= maximum:
            return None
        rate = difficulty.rate_of(group.row)
        step = max(self.published_step, 0)
        return PromptHistory(step=step, tries=rate.tries, mean_reward=rate.rate)

    def _assign_shards(self, group: Group) -> tuple[Mapping[str, Sequence[int]], int]:
        """Returns members by rollout, and the oldest weight version that these rollouts serve.

        All members go to one rollout, where they share their prompt's prefix, if its slots suffice.
        """
        stored_members = self._sample_index.members(group)
        members = [m for m in range(self._spec.now.samples_per_group) if m not in stored_members]
        count = math.ceil(len(members) / self._spec.now.rollout.max_running_samples)
        if count == 1:
            room = self.slot_usage.num_groups(1)
            worker_id, version = self._rollout_pool.choose(group.worker_id, room=room)
            return {worker_id: members}, version
        workers, version = self._rollout_pool.choose_several(count)
        return split(members, workers), version

    def _next_groups(self) -> list[Group]:
        """Returns parked groups, which the gate admitted before, then others that the gate admits now."""
        ledger = self._ledger
        # Groups finished beyond the next batch wait and grow stale, so others start only when they
        # are needed.
        ahead = max(0, ledger.count(GroupState.READY) - self.gate.groups_per_step)
        slots = self.slot_usage.num_groups(self._rollout_pool.num_replicas)
        free = slots - ledger.count(*RUNNING) - ahead
        if free <= 0:
            return []
        groups = resume_order(
            ledger.in_state(GroupState.PARTIAL),
            gate=self.gate,
            weight_version=self._rollout_pool.newest_version(),
        )[:free]
        # A PENDING group does not count as admitted here, so it passes the gate again. Otherwise a run that
        # was rewound to a checkpoint would generate more groups than the gate allows before it trains.
        waiting = ledger.count(GroupState.PENDING)
        room = self.gate.capacity(
            published=self.published_step - ledger.first_step,
            num_admitted=ledger.num_admitted - waiting,
            max_groups=free - len(groups),
        )
        if waiting and room:
            groups += ledger.in_state(GroupState.PENDING)[:room]
        num_new = min(room - min(waiting, room), self._total - ledger.num_admitted)
        return groups + [self._issue() for _ in range(num_new)]

    def _issue(self) -> Group:
        row = self._prompt_order.next_row(step=max(self.published_step, 0))
        if row is None:
            raise GenerationError(
                "every prompt of data.train is quarantined; first failure: "
                f"{self.first_failure or 'in an earlier attempt, see the GroupFailed events'}"
            )
        return self._ledger.issue(row, position=self._prompt_order.position)
