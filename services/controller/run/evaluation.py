"""Evaluates pinned weight versions on the held-out prompts, beside training.

shared replicas    all rollouts answer; weights stay as they are until the last response is stored
lent replicas      a few rollouts answer and keep their weights; the others, and training, go on
"""

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager

from services.common.batch import KVBatchMeta
from services.common.fields import group_of, partition_id
from services.common.spec.run import RunSpec
from services.controller.client import GroupFailure
from services.controller.run.assembly import Assembly
from services.controller.run.prompts import sample_seed
from services.controller.run.scores import Evaluation, Scored, evaluate
from services.controller.run.validation import (
    BegunEvaluation,
    Reason,
    ValidationMachine,
    ValidationState,
    is_periodic,
)
from services.rollout.client import GroupAssignment
from services.transferqueue.client import TransferQueueClient

logger = logging.getLogger(__name__)

# Seeds of held-out samples never meet those of training groups.
_SEED_OFFSET = 1 << 40
GROUP_PREFIX = "v"


class Evaluator:
    """Runs the validation machine of one run.

    Args:
        spec: The run's specification.
        run_id: Names its partitions.
        parts: Where the prompts go, and what keeps the weights as they are meanwhile.
        queue: Where the samples arrive.
        tell: Is told of every evaluation that begins, and of its end, whatever that is.
    """

    def __init__(
        self,
        spec: RunSpec,
        run_id: str,
        parts: Assembly,
        *,
        queue: TransferQueueClient,
        tell: Callable[[BegunEvaluation | Evaluation], Awaitable[None]],
    ) -> None:
        self._spec = spec
        self._partition = partition_id(run_id, "validation")
        self._num_rows = num_rows = parts.num_heldout_rows
        self._attempt = parts.attempt
        self._replicas = parts.replicas
        self._queue = queue
        self._weights = parts.weights
        self._tell = tell
        self._evaluated: Collection[int] = ()
        self._begun: BegunEvaluation | None = None
        self._version = -1
        self._temperatures = (0.0,) + (
            spec.validation.temperature,
        ) * spec.validation.samples_per_prompt
        self._machine = ValidationMachine(num_rows * len(self._temperatures), enabled=num_rows > 0)
        self._num_begun, self._num_reported = 0, 0
        self._changed = asyncio.Condition()
        self._asked: set[str] = set()
        self._samples: dict[str, KVBatchMeta] = {}
        self._failed: set[str] = set()

    async def restore(self, evaluated: Collection[int], begun: BegunEvaluation | None) -> None:
        """Go on behind an earlier loop.

        Args:
            evaluated: Versions that it evaluated.
            begun: What it did not bring to an end; it is begun again if its version is still served.
        """
        self._evaluated, self._begun = evaluated, begun
        left = await self._queue.get_batch(self._partition)
        if left.num_keys:
            await self._queue.release(self._partition, list(left.keys))

    async def published(self, version: int, *, step: int, is_last: bool = False) -> None:
        """The rollouts serve ``version``, the weights of ``step``; evaluate it if it is its turn."""
        self._version = version
        self._machine.published(version)
        begun, self._begun = self._begun, None
        if begun is not None:
            self._machine.trigger(begun.version, begun.reason)
            await self._report([], 0.0)
        reason = self._reason(step, is_last=is_last)
        is_known = version in self._evaluated or version == self._machine.pinned
        if reason is not None and not is_known:
            self._machine.trigger(version, reason)
        await self._notify()
        if self.is_busy and self._spec.validation.mode == "barrier":
            await self.idle()

    def change(self, spec: RunSpec) -> None:
        """Go on under a changed specification."""
        self._spec = spec

    @property
    def is_busy(self) -> bool:
        """Whether something is being evaluated."""
        return self._machine.pinned is not None

    async def trigger(self) -> None:
        """Evaluate the version that is served now, because somebody asks for it."""
        self._machine.trigger(self._version, "manual")
        await self._notify()

    async def idle(self) -> None:
        """Return when no evaluation is running or waiting."""
        resting = (ValidationState.IDLE, ValidationState.DISABLED, ValidationState.STOPPED)
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._machine.state in resting and self._machine.pending is None
            )

    async def run(self) -> None:
        """Evaluate whatever is triggered, for ever."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._machine.state is ValidationState.ACQUIRE)
            await self._evaluate()
            await self._notify()

    async def collect(self) -> None:
        """Take in finished samples for ever."""
        async for batch in self._queue.watch(self._partition, 0):
            late: list[str] = []
            for index, key in enumerate(batch.keys):
                if str(batch.tag("group_id")[index]) in self._asked:
                    self._samples[key] = batch.select([index])
                else:
                    late.append(key)
            if late:  # of an evaluation that took too long
                await self._queue.release(self._partition, late)
            await self._notify()

    async def leave_out_lost(self) -> None:
        """Leave groups out of the scores that were lost with a shard before they were seen, for ever."""
        async for loss in self._queue.watch_losses(self._partition):
            unseen = (key for key in loss.keys if key not in self._samples)
            self._failed |= self._asked & {group_of(key) for key in unseen}
            await self._notify()

    async def fail(self, failures: Sequence[GroupFailure]) -> None:
        """Take in held-out groups that brought no samples: they are left out of the scores."""
        self._failed.update(f.group_id for f in failures if f.group_id in self._asked)
        await self._notify()

    def _reason(self, step: int, *, is_last: bool) -> Reason | None:
        validation = self._spec.validation
        if is_last and validation.at_end:
            return "final"
        if step == 0 and (validation.before_train or validation.only):
            return "initial"
        return "periodic" if is_periodic(step, validation.every) else None

    async def _evaluate(self) -> None:
        clock = asyncio.get_running_loop().time
        machine, start = self._machine, clock()
        begun = machine.begun()
        await self._tell(begun)
        async with self._lease(begun) as workers:
            if workers:
                groups = self._groups(begun.version)
                await self._start(groups, workers)
                await self._await_samples(groups)
        samples = [_scored(meta) for meta in self._samples.values() if _has_reward(meta)]
        machine.scored()
        machine.reported()
        await self._report(samples, clock() - start)
        await self._queue.release(self._partition, list(self._samples))
        self._asked.clear()
        self._samples.clear()
        self._failed.clear()

    async def _report(self, samples: Sequence[Scored], seconds: float) -> None:
        """Report what ended; of several, only the first had samples."""
        results = self._machine.results[self._num_reported :]
        self._num_reported += len(results)
        for result in results:
            await self._tell(
                evaluate(
                    samples,
                    version=result.version,
                    reason=result.reason,
                    status=result.status,
                    seconds=seconds,
                )
            )
            samples, seconds = [], 0.0

    @asynccontextmanager
    async def _lease(self, begun: BegunEvaluation) -> AsyncIterator[Sequence[str]]:
        """Rollouts that serve the version and go on doing so; none if they were not to be had."""
        pin = self._weights.pin
        try:
            async with asyncio.timeout(self._spec.validation.timeout_s):
                await pin.acquire()
        except TimeoutError:
            self._machine.timeout()
            yield ()
            return
        lent: Sequence[str] = ()
        try:
            # A version may be served before this is told of it: its publication held the pin.
            if max(self._version, self._weights.version) != begun.version:
                self._machine.missed()
                yield ()
                return
            if begun.reason != "final":  # nobody trains beside it
                lent = self._replicas.lend(self._spec.validation.replicas)
            if lent:
                self._weights.lend(lent)
                pin.release()
                if self._spec.rollout.partial_rollout:
                    await self._replicas.interrupt(lent)
            self._machine.leased()
            yield lent or self._replicas.present()
        finally:
            if lent:
                await self._weights.take_back(lent)
                self._replicas.take_back(lent)
            else:
                pin.release()

    def _groups(self, version: int) -> list[GroupAssignment]:
        # Rollouts take a group that they had before for a repetition, so each evaluation has its own.
        self._num_begun += 1
        return [
            GroupAssignment(
                group_id=f"{GROUP_PREFIX}{version:06d}-{self._num_begun}-{row:06d}",
                attempt=self._attempt,
                split="heldout",
                row=row,
                partition_id=self._partition,
                members=tuple(range(len(self._temperatures))),
                seeds=tuple(
                    sample_seed(self._spec.seed, _SEED_OFFSET + row, member)
                    for member in range(len(self._temperatures))
                ),
                temperatures=self._temperatures,
            )
            for row in range(self._num_rows)
        ]

    async def _start(self, groups: Sequence[GroupAssignment], workers: Sequence[str]) -> None:
        self._asked.update(group.group_id for group in groups)
        by_worker: dict[str, list[GroupAssignment]] = defaultdict(list)
        for group, worker_id in zip(groups, itertools.cycle(workers), strict=False):
            by_worker[worker_id].append(group)
        await self._replicas.start(by_worker)

    async def _await_samples(self, groups: Sequence[GroupAssignment]) -> None:
        expected = len(groups) * len(self._temperatures)

        def num_done() -> int:
            whole = sum(group_of(key) not in self._failed for key in self._samples)
            return whole + len(self._failed) * len(self._temperatures)

        try:
            async with asyncio.timeout(self._spec.validation.timeout_s), self._changed:
                await self._changed.wait_for(lambda: num_done() >= expected)
            self._machine.sample_done(expected)
        except TimeoutError:
            self._machine.sample_done(num_done())
            self._machine.timeout()
            await self._replicas.cancel([group.group_id for group in groups])

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _has_reward(meta: KVBatchMeta) -> bool:
    """Whether a sample was scored: one whose reward service failed is no wrong answer."""
    return meta.tag("finish_reason")[0] != "failed"


def _scored(meta: KVBatchMeta) -> Scored:
    return Scored(
        prompt=str(meta.tag("group_id")[0]),
        source=str(meta.tag("data_source")[0]),
        reward=float(meta.tag("reward")[0]),
        answer=str(meta.tag("answer")[0]),
        is_greedy=bool(meta.tag("greedy")[0]),
    )
