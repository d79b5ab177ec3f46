"""Evaluates pinned weight versions on the held-out prompts while training continues.

::

    shared replicas   all rollouts answer; weights stay as they are until the last response is stored
    reserved replicas a few rollouts answer and keep their weights; the others continue to train
"""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager

from services.common.fields import group_of, partition_id
from services.common.runspec.data import HeldoutSetSpec, set_name
from services.controller.rules.evaluation import (
    Evaluation,
    EvaluationQueue,
    EvaluationRecord,
    EvaluationState,
    Reason,
    Scored,
    StartedEvaluation,
    checked,
    evaluate,
    is_periodic,
)
from services.controller.rules.prompts import sample_seed
from services.controller.run.connections import RunConnections
from services.controller.run.state.requests import CurrentSpec, RequestQueue
from services.controller.store.rows import Request
from services.wire.batch import KVBatchMeta
from services.wire.controller import GroupFailure
from services.wire.transferqueue.client import TransferQueueClient
from services.wire.workers import GroupAssignment

# Offset that keeps seeds of held-out samples apart from those of training groups.
_SEED_OFFSET = 1 << 40
GROUP_PREFIX = "v"


OnEvaluation = Callable[[StartedEvaluation | Evaluation, Request | None], Awaitable[None]]
"""Takes an evaluation that started or ended, and the request that it completes."""


class Evaluator:
    """Evaluates weight versions of one run, one at a time.

    Args:
        run_id: Identifier of the run; names its partitions.
        connections: Rollouts that answer, and the weight session that pins the version.
    """

    def __init__(
        self,
        spec: CurrentSpec,
        run_id: str,
        connections: RunConnections,
        *,
        queue: TransferQueueClient,
        request_queue: RequestQueue,
    ) -> None:
        self._spec = spec
        self._partition = partition_id(run_id, "validation")
        self._rows = connections.heldout_rows
        self._attempt = connections.attempt
        self._rollout_pool = connections.rollout_pool
        self._queue = queue
        self._weights = connections.weights
        self._request_queue = request_queue
        self._on_change: OnEvaluation | None = None
        self._record = EvaluationRecord()
        self._interrupted: list[StartedEvaluation] = []
        self._lost: list[StartedEvaluation] = []
        """Evaluations whose weights a rewind lost, not reported yet."""
        self._version = self._step = -1
        self._settled_step = -1
        """Newest step up to which every due evaluation is queued, ended or reported as missed."""
        self._evaluations = EvaluationQueue()
        self._is_leased = False
        """True once the current evaluation has its rollouts, or was refused any."""
        self._answering: Request | None = None
        """Request that the current evaluation will complete; None without one.

        Set when the evaluation gets its rollouts, so that it completes any request made until then.
        """
        self._num_begun = 0
        self._changed = asyncio.Condition()
        self._split_of_group: dict[str, str] = {}
        """Split of each group."""
        self._samples: dict[str, KVBatchMeta] = {}
        self._failed: set[str] = set()

    def report_to(self, on_change: OnEvaluation) -> None:
        """Sets what is called at the start and at the end of every evaluation, however it ends."""
        self._on_change = on_change

    async def _report(self, event: StartedEvaluation | Evaluation, request: Request | None) -> None:
        if self._on_change is not None:
            await self._on_change(event, request)

    async def restore(self, record: EvaluationRecord, *, num_steps: int) -> None:
        """Restores the evaluations that an earlier attempt left, and deletes its leftover samples.

        The evaluation that it began, and those that were due of versions that it served, are repeated if
        the rollouts serve their weights again, and reported as missed otherwise, as are those whose
        weights a rewind lost.

        Args:
            num_steps: Steps of the run.
        """
        self._record, self._settled_step = record, record.settled_step
        self._interrupted = [] if record.begun is None else [record.begun]
        self._lost = [*record.lost]
        for version, step in record.served if self._rows else ():
            reason = self._reason(step, is_last=step == num_steps)
            self._settled_step = step
            if reason is not None and version not in (*record.versions, self.interrupted):
                self._interrupted.append(StartedEvaluation(version, step, reason))
        leftovers = await self._queue.get_batch(self._partition)
        if leftovers.num_keys:
            await self._queue.release(self._partition, list(leftovers.keys))

    async def published(self, version: int, *, step: int, is_last: bool = False) -> None:
        """Records that the rollouts serve ``version``, and evaluates it if it is due.

        Args:
            step: Step whose weights these are.
            is_last: True if this is the last step of the run.
        """
        self._version, self._step = version, step
        reason = self._reason(step, is_last=is_last)
        self._settled_step = max(self._settled_step, step)
        if version in self._record.versions:
            reason = None
        lost_evaluations, self._lost = self._lost, []
        for evaluation in lost_evaluations:
            await self._report_missed(evaluation, EvaluationState.INTERRUPTED)
        interrupted, self._interrupted = self._interrupted, []
        for evaluation in interrupted:
            reason = _repeated(evaluation, version=version, due=reason)
            if evaluation.version != version:
                await self._report_missed(evaluation, EvaluationState.INTERRUPTED)
        # The current evaluation answers its own request, which stays pending until it is recorded.
        request = self._request_queue.get("evaluate")
        if reason is None and request is not None and request != self._answering:
            reason = "manual"
        current = self._evaluations.current
        if reason is not None and (current is None or current.version != version):
            await self._enqueue(StartedEvaluation(version, step, reason))
        await self._notify()
        if self.is_busy and self._spec.now.validation.mode == "barrier":
            await self.wait_idle()

    @property
    def interrupted(self) -> int | None:
        """Newest version whose evaluation was interrupted and not repeated yet; None without one."""
        return self._interrupted[-1].version if self._interrupted else None

    @property
    def is_busy(self) -> bool:
        """True while an evaluation is running."""
        return self._evaluations.current is not None

    @property
    def version(self) -> int:
        """Version that the rollouts serve; -1 before the first."""
        return self._version

    @property
    def pending_versions(self) -> list[int]:
        turns = self._evaluations.current, self._evaluations.next
        return [turn.version for turn in turns if turn is not None]

    async def evaluate_served(self) -> None:
        """Evaluates the served version at a user's request, unless a queued evaluation completes it.

        The request stays pending. Before a version is served, this does nothing: the evaluation of the
        first served version completes the request.
        """
        request = self._request_queue.get("evaluate")
        is_answered = request in (None, self._answering)  # by a version that was served meanwhile
        current, next_ = self._evaluations.current, self._evaluations.next
        waiting = (next_,) if self._is_leased else (current, next_)
        is_queued = any(job is not None and job.version == self._version for job in waiting)
        if self._version >= 0 and not is_answered and not is_queued:
            await self._enqueue(StartedEvaluation(self._version, self._step, "manual"))
            await self._notify()

    async def wait_idle(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._evaluations.current is None)

    async def wait_leased(self) -> None:
        """Waits until the current evaluation has its rollouts; a new version could replace its own before."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._evaluations.current is None or self._is_leased
            )

    async def exclude_rollouts(self, names: Collection[str]) -> None:
        """Waits until no evaluation holds any of the rollouts, which later evaluations do not use."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._rollout_pool.has_reserved(names))

    async def run(self) -> None:
        """Runs due evaluations until it is cancelled."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._evaluations.current is not None)
            assert self._evaluations.current is not None
            await self._evaluate(self._evaluations.current)
            self._evaluations.finish_current()
            self._is_leased = False
            await self._notify()

    async def collect(self) -> None:
        """Collects held-out samples until it is cancelled."""
        async for batch in self._queue.watch(self._partition, 0):
            late: list[str] = []
            for index, key in enumerate(batch.keys):
                if str(batch.tag("group_id")[index]) in self._split_of_group:
                    self._samples[key] = batch.select([index])
                else:
                    late.append(key)
            if late:  # samples of an evaluation that timed out
                await self._queue.release(self._partition, late)
            await self._notify()

    async def exclude_lost(self) -> None:
        """Excludes groups whose samples were lost with a shard from the scores, until it is cancelled."""
        async for loss in self._queue.watch_lost_samples(self._partition):
            unseen = (key for key in loss.keys if key not in self._samples)
            self._failed |= self._split_of_group.keys() & {group_of(key) for key in unseen}
            await self._notify()

    async def fail(self, failures: Sequence[GroupFailure]) -> None:
        """Excludes held-out groups that produced no samples from the scores."""
        self._failed.update(f.group_id for f in failures if f.group_id in self._split_of_group)
        await self._notify()

    def _reason(self, step: int, *, is_last: bool) -> Reason | None:
        validation = self._spec.now.validation
        if is_last and validation.at_end:
            return "final"
        if step == 0 and validation.begins:
            return "initial"
        # Steps whose weights were not published never arrive here, so this includes those since the last.
        since = range(self._settled_step + 1, step + 1)
        is_due = any(is_periodic(trained_step, validation.every) for trained_step in since)
        return "periodic" if is_due else None

    async def _enqueue(self, evaluation: StartedEvaluation) -> None:
        """Queues an evaluation, and reports the one that it replaces."""
        if not self._rows:
            return
        replaced = self._evaluations.enqueue(evaluation)
        if replaced is not None:
            await self._report_missed(replaced, EvaluationState.QUEUED)

    async def _report_missed(self, start: StartedEvaluation, state: EvaluationState) -> None:
        """Reports an evaluation that ends without its weights; it completes no request."""
        status = checked(state, EvaluationState.MISSED)
        await self._report(evaluate((), start, status=status, seconds=0.0), None)

    async def _evaluate(self, evaluation_start: StartedEvaluation) -> None:
        clock = asyncio.get_running_loop().time
        start = clock()
        status = EvaluationState.MISSED
        if evaluation_start.version == self._version:
            self._evaluations.move(EvaluationState.RUNNING)
            await self._report(evaluation_start, None)
            status = await self._generate(evaluation_start)
        self._evaluations.move(status)
        await self._mark_leased()
        scored = evaluate(
            (self._scored(meta) for meta in self._samples.values() if _has_reward(meta)),
            evaluation_start,
            status=status,
            seconds=clock() - start,
            solved_from=self._spec.now.validation.solved_from,
        )
        # A missed evaluation completes no request.
        is_missed = status is EvaluationState.MISSED
        await self._report(scored, None if is_missed else self._answering)
        self._answering = None
        collected = list(self._samples)
        self._split_of_group.clear()
        self._samples.clear()
        self._failed.clear()
        await self._queue.release(self._partition, collected)

    async def _generate(self, start: StartedEvaluation) -> EvaluationState:
        """Generates responses to the held-out prompts under the version; returns how that ended."""
        try:
            async with asyncio.timeout(self._spec.now.validation.timeout_s):
                await self._weights.pin.acquire()
        except TimeoutError:
            self._answering = self._request_queue.get("evaluate")
            return EvaluationState.TIMEOUT
        async with self._lease(start) as workers:
            if not workers:
                return EvaluationState.MISSED
            groups = self._groups(start.version)
            await self._start(groups, workers)
            return await self._await_samples(groups)

    @asynccontextmanager
    async def _lease(self, start: StartedEvaluation) -> AsyncIterator[Sequence[str]]:
        """Yields rollouts that serve the version and keep it; none if they serve another version already.

        The caller holds the pin, which this method releases. Its end waits for nothing, so that a loss
        during an evaluation is recovered from at once.
        """
        reserved: Sequence[str] = ()
        try:
            # A newer version may be in service although ``published`` was not called for it yet: its
            # publication held the pin.
            if max(self._version, self._weights.version) != start.version:
                yield ()
                return
            self._answering = self._request_queue.get("evaluate")
            if start.reason != "final":  # the final one uses all rollouts, because training is over
                reserved = self._rollout_pool.reserve(self._spec.now.validation.replicas)
            if reserved:
                self._weights.reserve(reserved)
                self._weights.pin.release()
                if self._spec.now.rollout.partial_rollout:
                    await self._rollout_pool.interrupt(reserved)
            await self._mark_leased()
            yield reserved or self._rollout_pool.present()
        finally:
            if reserved:
                self._weights.unreserve(reserved)
                self._rollout_pool.unreserve(reserved)
            else:
                self._weights.pin.release()

    async def _mark_leased(self) -> None:
        self._is_leased = True
        await self._notify()

    def _groups(self, version: int) -> list[GroupAssignment]:
        # Rollouts ignore a repeated group, so each evaluation has its own group ids.
        self._num_begun += 1
        rows = [(split, row) for split, count in self._rows.items() for row in range(count)]
        return [
            GroupAssignment(
                group_id=f"{GROUP_PREFIX}{version:06d}-{self._num_begun}-{number:06d}",
                attempt=self._attempt,
                split=split,
                row=row,
                partition_id=self._partition,
                members=tuple(range(len(temperatures := self._temperatures(split)))),
                seeds=tuple(
                    sample_seed(self._spec.now.seed, _SEED_OFFSET + number, member)
                    for member in range(len(temperatures))
                ),
                temperatures=temperatures,
                first_attempt=self._attempt,  # groups are unique to an evaluation: nothing is resumed
            )
            for number, (split, row) in enumerate(rows)
        ]

    def _temperatures(self, split: str) -> tuple[float, ...]:
        """Returns one temperature per sample of a prompt of the set; the first sample is greedy."""
        validation, set_spec = self._spec.now.validation, self._spec.now.data.heldout_sets[split]
        if not (set_spec.rewards or self._spec.now.rollout.rewards):
            return (0.0,)  # without rewards, one sample measures the likelihood of the row's answer
        count = validation.samples_per_prompt
        if isinstance(set_spec, HeldoutSetSpec) and set_spec.samples_per_prompt is not None:
            count = set_spec.samples_per_prompt
        return (0.0,) + (validation.temperature,) * count

    async def _start(self, groups: Sequence[GroupAssignment], workers: Sequence[str]) -> None:
        self._split_of_group.update((group.group_id, group.split) for group in groups)
        by_worker: dict[str, list[GroupAssignment]] = defaultdict(list)
        for group, worker_id in zip(groups, itertools.cycle(workers), strict=False):
            by_worker[worker_id].append(group)
        await self._rollout_pool.start(by_worker)

    async def _await_samples(self, groups: Sequence[GroupAssignment]) -> EvaluationState:
        sizes = {group.group_id: len(group.members) for group in groups}
        num_samples = sum(sizes.values())

        def num_done() -> int:
            num_complete = sum(group_of(key) not in self._failed for key in self._samples)
            return num_complete + sum(sizes[group_id] for group_id in self._failed)

        try:
            async with asyncio.timeout(self._spec.now.validation.timeout_s), self._changed:
                await self._changed.wait_for(lambda: num_done() >= num_samples)
        except TimeoutError:
            await self._rollout_pool.cancel([group.group_id for group in groups])
            return EvaluationState.TIMEOUT
        return EvaluationState.OK

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _scored(self, meta: KVBatchMeta) -> Scored:
        group_id = str(meta.tag("group_id")[0])
        return Scored(
            prompt=group_id,
            set_name=set_name(self._split_of_group[group_id]),
            source=str(meta.tag("data_source")[0]),
            reward=float(meta.tag("reward")[0]),
            answer=str(meta.tag("answer")[0]),
            is_greedy=bool(meta.tag("greedy")[0]),
            terms=str(meta.tag("terms")[0]),
        )


def _repeated(start: StartedEvaluation, *, version: int, due: Reason | None) -> Reason:
    """Returns the reason for evaluating the first served version after an evaluation was interrupted.

    The interrupted version may be gone, if training continued and no worker holds its weights. The
    version that is served now is then evaluated instead, but not as the initial one, which scores
    the model before training.
    """
    if start.version == version:
        return start.reason
    return due or ("periodic" if start.reason == "initial" else start.reason)


def _has_reward(meta: KVBatchMeta) -> bool:
    """Returns True if a sample was scored; a failed reward service does not count as a wrong answer."""
    return meta.tag("finish_reason")[0] != "failed"
