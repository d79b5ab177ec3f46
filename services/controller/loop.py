"""The control loop of one run.

    Generation   waits for room under the staleness gate   -> rollouts generate, score, store
    RunLoop      waits for a batch of finished groups      -> trainer trains it; commit; publish weights
    Evaluator    waits for a version to evaluate           -> rollouts answer the held-out prompts

Synchronous, one step off and fully asynchronous training are this loop with another staleness bound.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from services.common.clock import Clock
from services.common.errors import FailedPreconditionError
from services.common.fields import ROLLOUT_FIELDS, partition_id
from services.common.grpc_client import open_channel
from services.common.spec.run import RunSpec
from services.controller import metrics
from services.controller.client import GroupFailure
from services.controller.evaluation import Evaluation, Evaluator
from services.controller.generation import Generation
from services.controller.launcher import worker_names
from services.controller.ledger import Group, GroupState, Ledger
from services.controller.membership import Membership, Worker
from services.controller.progress import Progress
from services.controller.prompts import PromptOrder
from services.controller.replay import choose_batch
from services.controller.replicas import Replicas
from services.controller.weight_sync import WeightSession
from services.trainer.client import TrainerClient
from services.transferqueue.client import TransferQueueClient

logger = logging.getLogger(__name__)

Recorder = Callable[..., None]
"""Stores an event: ``record(type, message, data, step=, weight_version=, summary=)``."""


class RunLoop:
    """Drives one run from its registered workers to its last step.

    Args:
        run_id: The run.
        spec: Its specification.
        membership: Where its workers register.
        queue: The transferqueue.
        clock: For stalls.
        record: Stores an event and the progress it tells of.
    """

    def __init__(
        self,
        run_id: str,
        spec: RunSpec,
        *,
        membership: Membership,
        queue: TransferQueueClient,
        clock: Clock,
        record: Recorder,
    ) -> None:
        self._run_id = run_id
        self._spec = spec
        self._membership = membership
        self._queue = queue
        self._clock = clock
        self._record = record
        self._ledger = Ledger(spec.rollout.max_attempts)
        self._progress = Progress(spec.algorithm.max_staleness)
        self._weights = WeightSession(spec.weight_sync, run_id)
        self._replicas = Replicas()
        self._generation: Generation | None = None
        self._evaluator: Evaluator | None = None
        self._idle_before = 0.0
        self._tokens_before = 0.0

    async def run(self, *, on_ready: Callable[[], None]) -> None:
        """Train all steps. Workers are being started; ``on_ready`` is called once they can work.

        Raises:
            ServiceError: If a worker or the data plane failed beyond repair.
        """
        async with AsyncExitStack() as stack:
            await self._create_partitions(stack)
            trainer = await self._await_workers(stack)
            generation, evaluator = self._build()
            on_ready()
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(work())
                    for work in (generation.collect, evaluator.collect, evaluator.run)
                ]
                await self._publish(0, generation, evaluator)
                if not self._spec.validation.only:
                    background.append(tasks.create_task(generation.supply()))
                    await self._train(trainer, generation, evaluator)
                await evaluator.idle()
                for task in background:
                    task.cancel()
            self._note("Finished", "all steps are trained, published and evaluated", {})

    async def report_failures(self, failures: Sequence[GroupFailure]) -> None:
        """Take in groups that brought no samples."""
        if self._generation is None or self._evaluator is None:
            return
        heldout = [failure for failure in failures if failure.group_id.startswith("v")]
        await self._evaluator.fail(heldout)
        await self._generation.fail([f for f in failures if not f.group_id.startswith("v")])
        for failure in failures:
            self._record(
                "GroupFailed",
                f"{failure.group_id}: {failure.reason}: {failure.message}",
                {"group_id": failure.group_id, "reason": failure.reason},
            )

    async def _train(
        self, trainer: TrainerClient, generation: Generation, evaluator: Evaluator
    ) -> None:
        for step in range(1, self._spec.trainer.steps + 1):
            begin = time.perf_counter()
            batch = await self._take_batch(generation, trainer_version=step - 1)
            wait_s = time.perf_counter() - begin
            result = await trainer.train_step(
                step, generation.meta(batch), timeout_s=self._spec.limits.step_timeout_s
            )
            self._commit(step, batch, result.metrics, wait_s=wait_s, begin=begin)
            await generation.release(batch)
            is_last = step == self._spec.trainer.steps
            if step % self._spec.weight_sync.publish_every == 0 or is_last:
                await self._publish(step, generation, evaluator)

    async def _take_batch(self, generation: Generation, *, trainer_version: int) -> list[Group]:
        """Wait for the groups of the next batch."""
        algorithm = self._spec.algorithm
        deadline = self._clock.monotonic() + algorithm.stale_wait_timeout_s
        while True:
            may_wait = algorithm.on_stale == "wait" and self._clock.monotonic() < deadline
            choice = choose_batch(
                self._ledger.in_state(GroupState.READY),
                self._ledger.running(),
                gate=generation.gate,
                trainer_version=trainer_version,
                wait_for_due=may_wait,
                keep_stale=algorithm.on_stale in ("wait", "mask"),
            )
            for group in choice.stale:
                if algorithm.on_stale == "restart":
                    await generation.restart(group, "stale")
                else:
                    await generation.drop(group, "stale")
            if choice.batch:
                self._ledger.train(choice.batch)
                return list(choice.batch)
            if not choice.stale:
                rest_s = deadline - self._clock.monotonic()
                await _wait(generation.finished, rest_s if rest_s > 0 else None)

    def _commit(
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
        self._progress.stepped(trained)
        metrics.observe_step(self._run_id, step, trained, self._ledger.counts())
        idle, tokens = self._replicas.idle_seconds(), self._replicas.tokens_total()
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
        self._note("StepCommitted", f"step {step} is trained", data, step=step)

    async def _publish(self, version: int, generation: Generation, evaluator: Evaluator) -> None:
        """Bring the trainer's weights into service, then open the gate and evaluate if it is time."""
        report = await self._weights.publish(version)
        for worker in self._membership.workers(self._run_id, "rollout"):
            worker.weight_version = version
        self._progress.synced(report)
        metrics.observe_sync(self._run_id, report)
        self._note(
            "WeightsPublished",
            f"weight version {version} is served by every rollout",
            {
                "version": version,
                "sync_ms": report.total_s * 1000,
                "prepare_ms": report.prepare_s * 1000,
                "transfer_ms": report.transfer_s * 1000,
                "adopt_ms": report.adopt_s * 1000,
                "stall_ms": report.stall_s * 1000,
                "size_bytes": report.num_bytes,
                "digest": report.digest,
            },
            weight_version=version,
        )
        generation.published(version)
        await evaluator.published(version, is_last=version == self._spec.trainer.steps)

    def _evaluated(self, evaluation: Evaluation) -> None:
        self._progress.evaluated(evaluation)
        self._note(
            "Validated",
            f"weight version {evaluation.version}: greedy {evaluation.greedy}, sampled {evaluation.sampled}",
            {
                "version": evaluation.version,
                "reason": evaluation.reason,
                "status": evaluation.status,
                "num_samples": evaluation.num_samples,
                "greedy": evaluation.greedy,
                "sampled": evaluation.sampled,
                "by_source": evaluation.by_source,
                "seconds": evaluation.seconds,
            },
        )

    async def _create_partitions(self, stack: AsyncExitStack) -> None:
        for purpose in ("train", "validation", "partial"):
            name = partition_id(self._run_id, purpose)
            await self._queue.create_partition(
                name,
                required_fields=ROLLOUT_FIELDS if purpose != "partial" else (),
                quota_bytes=self._spec.transferqueue.quota_bytes,
            )
            stack.push_async_callback(self._queue.drop_partition, name)

    async def _await_workers(self, stack: AsyncExitStack) -> TrainerClient:
        """Wait until all workers have loaded, and connect to them."""
        names = [name for _, name in worker_names(self._spec)]

        def missing() -> list[str]:
            loaded = {
                worker.worker_id
                for worker in self._membership.workers(self._run_id)
                if worker.state in ("loaded", "ready")
                and (worker.role != "rollout" or "prompts_train" in worker.gauges)
            }
            return [name for name in names if name not in loaded]

        await self._membership.wait_until(
            lambda: not missing(),
            timeout_s=self._spec.limits.start_timeout_s,
            waiting_for=lambda: f"{', '.join(missing())} to load; see their logs",
        )
        (trainer,) = self._membership.workers(self._run_id, "trainer")
        rollouts = self._membership.workers(self._run_id, "rollout")
        stack.push_async_callback(self._weights.close)
        await self._weights.open(trainer, rollouts)
        stack.push_async_callback(self._replicas.close)
        await self._replicas.open(rollouts)
        return TrainerClient(await stack.enter_async_context(open_channel(trainer.address)))

    def _build(self) -> tuple[Generation, Evaluator]:
        rollouts = self._membership.workers(self._run_id, "rollout")
        order = PromptOrder(
            _agreed_rows(rollouts, "prompts_train"),
            seed=self._spec.seed,
            shuffle=self._spec.data.shuffle,
        )
        self._generation = Generation(
            self._spec,
            self._run_id,
            ledger=self._ledger,
            order=order,
            replicas=self._replicas,
            queue=self._queue,
            clock=self._clock,
        )
        self._evaluator = Evaluator(
            self._spec,
            self._run_id,
            num_rows=_agreed_rows(rollouts, "prompts_heldout"),
            replicas=self._replicas,
            queue=self._queue,
            pin=self._weights.pin,
            on_result=self._evaluated,
        )
        return self._generation, self._evaluator

    def _note(
        self,
        type_: str,
        message: str,
        data: Mapping[str, Any],
        *,
        step: int | None = None,
        weight_version: int | None = None,
    ) -> None:
        summary = self._progress.summary(self._ledger.counts(), self._ledger.reasons())
        self._record(
            type_, message, data, step=step, weight_version=weight_version, summary=summary
        )


async def _wait(condition: asyncio.Condition, timeout_s: float | None) -> None:
    try:
        async with asyncio.timeout(timeout_s), condition:
            await condition.wait()
    except TimeoutError:
        return


def _agreed_rows(rollouts: Sequence[Worker], gauge: str) -> int:
    counts = {worker.worker_id: int(worker.gauges.get(gauge, 0)) for worker in rollouts}
    if len(set(counts.values())) != 1:
        raise FailedPreconditionError(
            f"the rollouts loaded different data: {gauge} is {counts}; give all of them the same files"
        )
    return next(iter(counts.values()))
