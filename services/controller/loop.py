"""The control loop of one run.

    Generation   waits for room under the staleness gate   -> rollouts generate, score, store
    RunLoop      waits for a batch of finished groups      -> trainer trains it; commit; publish weights
    Evaluator    waits for a version to evaluate           -> rollouts answer the held-out prompts

Synchronous, one step off and fully asynchronous training are this loop with another staleness bound. A loop is
entered again after every loss, of a worker or of the controller itself, and goes on from the database.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict

from services.common.clock import Clock
from services.common.errors import FailedPreconditionError, ServiceError, UnavailableError
from services.common.fields import partition_id
from services.common.spec.run import RunSpec
from services.controller import metrics
from services.controller.assembly import Assembly, assemble, create_partitions, drop_partitions
from services.controller.batching import take_batch
from services.controller.client import GroupFailure
from services.controller.evaluation import Evaluation, Evaluator
from services.controller.generation import Generation
from services.controller.journal import Journal, Recovered
from services.controller.ledger import Group, GroupState, Ledger
from services.controller.membership import Membership
from services.controller.progress import Progress
from services.controller.prompts import PromptOrder
from services.controller.records import Note
from services.controller.stored import StoredGroups
from services.transferqueue.client import TransferQueueClient

logger = logging.getLogger(__name__)


class RunLoop:
    """Drives one run from its registered workers to its last step, or until something is lost.

    Args:
        run_id: The run.
        spec: Its specification.
        membership: Where its workers register.
        queue: The transferqueue.
        clock: For stalls.
        journal: Where the run stands, and where what happens is written.
    """

    def __init__(
        self,
        run_id: str,
        spec: RunSpec,
        *,
        membership: Membership,
        queue: TransferQueueClient,
        clock: Clock,
        journal: Journal,
    ) -> None:
        self._run_id = run_id
        self._spec = spec
        self._membership = membership
        self._queue = queue
        self._clock = clock
        self._journal = journal
        self._progress = Progress(spec.algorithm.max_staleness)
        self._is_restored = False
        self._step = 0
        self._published = -1
        self._version_offset = 0
        self._idle_before = 0.0
        self._tokens_before = 0.0
        self._parts: Assembly
        self._ledger: Ledger
        self._generation: Generation
        self._evaluator: Evaluator

    async def run(
        self, *, on_ready: Callable[[], Awaitable[None]], lost_workers: Collection[str] = ()
    ) -> None:
        """Train all steps that are left.

        Args:
            on_ready: Called once the workers can work.
            lost_workers: Rollouts that died since the loop was entered before.

        Raises:
            ServiceError: If a worker or the data plane failed.
        """
        attempt = await self._journal.begin_attempt()
        async with AsyncExitStack() as stack:
            await create_partitions(self._queue, self._run_id, self._spec)
            self._parts = await assemble(
                stack, self._run_id, self._spec, membership=self._membership, attempt=attempt
            )
            recovered = await self._restore(attempt, lost_workers)
            await on_ready()
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(work())
                    for work in (
                        self._generation.collect, self._evaluator.collect, self._evaluator.run
                    )
                ]  # fmt: skip
                await self._catch_up(recovered)
                if not self._spec.validation.only:
                    background.append(tasks.create_task(self._generation.supply()))
                    await self._train()
                await self._evaluator.idle()
                for task in background:
                    task.cancel()
        await self._note("Finished", "all steps are trained, published and evaluated", {})

    async def report_failures(self, failures: Sequence[GroupFailure]) -> None:
        """Take in groups that brought no samples.

        Raises:
            UnavailableError: If the loop does not know yet what is in flight; the worker asks again.
        """
        if not self._is_restored:
            raise UnavailableError("the run is being restored; report again")
        await self._evaluator.fail([f for f in failures if f.group_id.startswith("v")])
        await self._generation.fail([f for f in failures if not f.group_id.startswith("v")])

    async def _train(self) -> None:
        for step in range(self._step + 1, self._spec.trainer.steps + 1):
            begin = time.perf_counter()
            batch = await take_batch(
                self._generation,
                self._ledger,
                self._spec.algorithm,
                weight_version=self._version_of(step - 1),
                clock=self._clock,
            )
            await self._journal.begin_step(
                step, self._ledger, version=self._version_of(step - 1), groups=batch
            )
            await self._train_step(step, batch, begin=begin, wait_s=time.perf_counter() - begin)
            is_last = step == self._spec.trainer.steps
            if step % self._spec.weight_sync.publish_every == 0 or is_last:
                await self._publish(step)

    async def _train_step(
        self, step: int, batch: Sequence[Group], *, begin: float, wait_s: float
    ) -> None:
        result = await self._parts.trainer.train_step(
            step, self._generation.stored.meta(batch), timeout_s=self._spec.limits.step_timeout_s
        )
        await self._commit(step, batch, result.metrics, wait_s=wait_s, begin=begin)
        await self._generation.release(batch)

    async def _commit(
        self,
        step: int,
        batch: Sequence[Group],
        trained: Mapping[str, float],
        *,
        wait_s: float,
        begin: float,
    ) -> None:
        """Record a step and everything it consumed, in one transaction."""
        self._ledger.consume(batch)
        self._step = step
        self._progress.stepped(trained)
        metrics.observe_step(self._run_id, step, trained, self._ledger.counts())
        replicas = self._parts.replicas
        idle, tokens = replicas.idle_seconds(), replicas.tokens_total()
        seconds = time.perf_counter() - begin
        data = {
            "step": step,
            **trained,
            "seconds": seconds,
            "trainer_wait_s": wait_s,
            "rollout_idle_s": max(idle - self._idle_before, 0.0),
            "generated_tokens_per_s": max(tokens - self._tokens_before, 0.0) / seconds,
            "ready_groups": len(self._ledger.in_state(GroupState.READY)),
            "running_groups": len(self._ledger.running()),
        }
        self._idle_before, self._tokens_before = idle, tokens
        note = Note("StepCommitted", f"step {step} is trained", data, step, None, self._summary())
        await self._journal.commit_step(step, self._ledger, note=note, metrics=data)

    async def _publish(self, step: int) -> None:
        """Bring the weights of a step into service, then open the gate and evaluate if it is time."""
        version = self._version_of(step)
        report = await self._parts.weights.publish(version)
        for worker in self._membership.workers(self._run_id, "rollout"):
            worker.weight_version = version
        self._progress.synced(report)
        metrics.observe_sync(self._run_id, report)
        data = {
            "version": version,
            "sync_ms": report.total_s * 1000,
            "prepare_ms": report.prepare_s * 1000,
            "transfer_ms": report.transfer_s * 1000,
            "adopt_ms": report.adopt_s * 1000,
            "stall_ms": report.stall_s * 1000,
            "size_bytes": report.num_bytes,
            "digest": report.digest,
        }
        await self._note(
            "WeightsPublished",
            f"weight version {version} is served by every rollout",
            data,
            weight_version=version,
        )
        await self._served(step)

    async def _served(self, step: int) -> None:
        """Every rollout serves the weights of a step."""
        self._generation.published(step)
        await self._evaluator.published(
            self._version_of(step), is_last=step == self._spec.trainer.steps
        )

    def _version_of(self, step: int) -> int:
        """Weight version of a step's weights."""
        return step + self._version_offset

    async def _evaluated(self, evaluation: Evaluation) -> None:
        self._progress.evaluated(evaluation)
        await self._note(
            "Validated",
            f"weight version {evaluation.version}: greedy {evaluation.greedy}, "
            f"sampled {evaluation.sampled}",
            asdict(evaluation),
        )

    async def _restore(self, attempt: int, lost_workers: Collection[str]) -> Recovered:
        """Rebuild ledger, generation and evaluation from the database and the transferqueue."""
        recovered = await self._journal.load()
        if self._parts.trained < recovered.step:
            recovered = await self._rewind(recovered)
        self._step = recovered.step
        self._version_offset = recovered.version_offset
        self._published = recovered.run.weight_version
        self._progress.restore(recovered.run.summary, recovered.syncs_ms)
        self._ledger = Ledger.restore(
            recovered.ledger,
            max_attempts=self._spec.rollout.max_attempts,
            now=self._clock.monotonic(),
        )
        self._generation = self._make_generation(recovered)
        self._evaluator = Evaluator(
            self._spec,
            self._run_id,
            num_rows=self._parts.num_heldout_rows,
            attempt=attempt,
            evaluated=recovered.evaluated,
            replicas=self._parts.replicas,
            queue=self._queue,
            pin=self._parts.weights.pin,
            on_result=self._evaluated,
        )
        await self._evaluator.restore()
        await self._generation.restore(lost_workers)
        self._is_restored = True
        return recovered

    def _make_generation(self, recovered: Recovered) -> Generation:
        order = PromptOrder(
            self._parts.num_train_rows,
            seed=self._spec.seed,
            shuffle=self._spec.data.shuffle,
            position=recovered.ledger.position,
            quarantined=recovered.quarantined_rows,
        )
        partition = partition_id(self._run_id, "train")
        return Generation(
            self._spec,
            self._run_id,
            ledger=self._ledger,
            order=order,
            journal=self._journal,
            replicas=self._parts.replicas,
            stored=StoredGroups(self._queue, partition, self._spec.rollout.group_size),
            clock=self._clock,
        )

    async def _rewind(self, recovered: Recovered) -> Recovered:
        """Go back to the step that the trainer has; everything made by later weights is made anew."""
        step = self._parts.trained
        in_flight = [group.group_id for group in recovered.ledger.groups]
        await self._parts.replicas.cancel(in_flight)
        await drop_partitions(self._queue, self._run_id)
        await create_partitions(self._queue, self._run_id, self._spec)
        message = f"the trainer lost what it trained after step {step}; training goes on from there"
        await self._journal.rewind(step, version=recovered.run.weight_version + 1, message=message)
        logger.warning("run rewound", extra={"run": self._run_id, "step": step})
        return await self._journal.load()

    async def _catch_up(self, recovered: Recovered) -> None:
        """Settle the step that was being trained, then see that every rollout serves the newest weights."""
        begun = recovered.begun
        if begun is not None:
            await self._settle(begun.step)
        elif self._parts.trained > self._step:
            raise FailedPreconditionError(
                f"the trainer has trained step {self._parts.trained}, but the database knows of "
                f"{self._step}: they are not of the same run, or the database is an old copy"
            )
        published_step = self._published - self._version_offset
        is_due = self._step % self._spec.weight_sync.publish_every == 0
        if self._parts.served != self._published or (is_due and published_step < self._step):
            await self._publish(self._step)
        else:
            await self._served(published_step)

    async def _settle(self, step: int) -> None:
        """Finish the step that was begun, or put its groups back if their samples are gone."""
        batch = self._ledger.in_state(GroupState.TRAINING)
        stored = [group for group in batch if group in self._generation.stored]
        is_trained = self._parts.trained == step
        if is_trained or len(stored) == len(batch):
            await self._finish_begun(step, batch, stored)
            return
        self._ledger.put_back(stored)
        for group in batch:
            if group not in self._generation.stored:
                self._ledger.requeue(group)
        await self._journal.forget_step(step, self._ledger)

    async def _finish_begun(
        self, step: int, batch: Sequence[Group], stored: Sequence[Group]
    ) -> None:
        begin = time.perf_counter()
        trained: Mapping[str, float] = {}
        if stored:
            result = await self._parts.trainer.train_step(
                step,
                self._generation.stored.meta(stored),
                timeout_s=self._spec.limits.step_timeout_s,
            )
            trained = result.metrics
        await self._commit(step, batch, trained, wait_s=0.0, begin=begin)
        await self._generation.release(stored)

    def _summary(self) -> dict[str, object]:
        return self._progress.summary(self._ledger.counts(), self._ledger.reasons())

    async def _note(
        self,
        type_: str,
        message: str,
        data: Mapping[str, object],
        *,
        weight_version: int | None = None,
    ) -> None:
        note = Note(type_, message, data, None, weight_version, self._summary())
        await self._journal.note(note, self._ledger)
