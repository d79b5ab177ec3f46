"""The control loop of one run.

    Generation   waits for room under the staleness gate   -> rollouts generate, score, store
    RunLoop      waits for a batch of finished groups      -> trainer trains it; commit; publish weights
    Evaluator    waits for a version to evaluate           -> rollouts answer the held-out prompts

Synchronous, one step off and asynchronous training are this loop with another staleness bound. It is entered
again after every loss, of a worker or of the controller itself, and goes on from the database.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict

from services.common.clock import Clock
from services.common.errors import UnavailableError
from services.common.spec.run import RunSpec
from services.common.task_group import TaskGroup
from services.controller.client import GroupFailure
from services.controller.membership import Membership
from services.controller.run.assembly import assemble
from services.controller.run.batching import take_batch
from services.controller.run.checkpoints import Checkpoints
from services.controller.run.groups import RUNNING
from services.controller.run.journal import Journal
from services.controller.run.progress import sync_facts
from services.controller.run.recovery import Restored, restore
from services.controller.run.scores import Evaluation
from services.controller.run.steps import Steps
from services.controller.run.validation import BegunEvaluation
from services.controller.run.waits import Waits
from services.controller.store.records import Note
from services.transferqueue.client import TransferQueueClient


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
        self._checkpoints = Checkpoints(
            run_id, keep=spec.trainer.checkpoint.keep, journal=journal, queue=queue
        )
        self._waits = Waits()
        self._steps = Steps(run_id, spec, journal, self._waits)
        self._state: Restored | None = None
        self._pausing, self._is_save_wanted = asyncio.Event(), False
        self._saves_at_pause, self._doing = True, ""
        self.step = 0
        """The last committed step."""

    def pause(self, *, saves: bool = True) -> None:
        """End the loop at the next step boundary, behind a checkpoint unless ``saves`` is False."""
        self._saves_at_pause = saves
        self._pausing.set()

    def change(self, spec: RunSpec) -> None:
        """Go on under a changed specification from the next step on."""
        self._spec = spec
        if self._state is not None:
            self._state.evaluator.change(spec)

    def activities(self) -> list[str]:
        """What the run is doing now."""
        state = self._state
        if state is None:
            return []
        is_generating = state.ledger.count(*RUNNING) > 0
        found = {
            self._doing: bool(self._doing),
            "GENERATING": is_generating,
            "VALIDATING": state.evaluator.is_busy,
        }
        return [name for name, is_true in found.items() if is_true]

    def save_soon(self) -> None:
        """Save a checkpoint at the end of the current step."""
        self._is_save_wanted = True

    async def evaluate_now(self) -> None:
        """Evaluate the weights that are served."""
        if self._state is not None:
            await self._state.evaluator.trigger()

    async def run(
        self,
        *,
        on_ready: Callable[[], Awaitable[None]],
        lost_workers: Collection[str] = (),
        absent: Collection[str] = (),
    ) -> bool:
        """Train all steps that are left.

        Args:
            on_ready: Called once the workers can work.
            lost_workers: Rollouts that died since the loop was entered before.
            absent: Rollouts that it goes on without.

        Returns:
            Whether all steps are trained; otherwise the run was paused.
        """
        attempt = await self._journal.begin_attempt()
        async with AsyncExitStack() as stack:
            parts = await assemble(
                stack,
                self._run_id,
                self._spec,
                self._membership,
                queue=self._queue,
                attempt=attempt,
                absent=absent,
                snapshot_id=await self._journal.newest_snapshot(),
            )
            state = self._state = await restore(
                self._run_id,
                self._spec,
                parts,
                journal=self._journal,
                queue=self._queue,
                clock=self._clock,
                lost_workers=lost_workers,
                on_evaluation=self._note_evaluation,
            )
            self.step = state.step
            await on_ready()
            async with TaskGroup() as tasks:
                background = [
                    tasks.create_task(state.generation.collect()),
                    tasks.create_task(state.generation.replace_lost()),
                    tasks.create_task(state.evaluator.collect()),
                    tasks.create_task(state.evaluator.leave_out_lost()),
                    tasks.create_task(state.evaluator.run()),
                ]
                await self._catch_up(state)
                if not self._spec.validation.only:
                    supply = tasks.create_task(state.generation.supply())
                    await self._train(state)
                    supply.cancel()
                await self._wind_up(state)
                for task in background:
                    task.cancel()
            if not self._is_done():
                return False
            await self._note(state, "Finished", "all steps are trained and evaluated", {})
        return True

    async def report_failures(self, failures: Sequence[GroupFailure]) -> None:
        """Take in groups that brought no samples.

        Raises:
            UnavailableError: If the loop does not know yet what is in flight; the worker asks again.
        """
        if self._state is None:
            raise UnavailableError("the run is being restored; report again")
        await self._state.evaluator.fail(failures)
        await self._state.generation.fail(failures)

    async def _catch_up(self, state: Restored) -> None:
        """Settle the step that was being trained; see that every rollout serves the newest weights."""
        if state.begun is not None:
            is_untrained = state.parts.trained < state.begun
            if state.parts.scoring.is_active and is_untrained:
                # A worker that was started again scores the step under the weights that it starts from.
                await self._publish(state, self.step)
            if await self._steps.settle(state, state.begun):
                self.step = state.begun
        served_step = state.published - state.version_offset
        is_due = served_step < self.step and self._is_published(self.step)
        if state.parts.served != state.published or is_due:
            await self._publish(state, self.step)
        else:
            await self._open_gate(state, served_step)

    async def _wind_up(self, state: Restored) -> None:
        """End the run, or hold it: what is unfinished is kept, with the checkpoint, for another day."""
        if self._is_done():
            self._doing = "FINALIZING"
            await state.evaluator.idle()
        elif self._spec.rollout.partial_rollout:
            await state.parts.replicas.interrupt()
        if self._is_done() or self._saves_at_pause:
            await self._save(state)

    async def _train(self, state: Restored) -> None:
        while not self._is_done():
            self._doing = ""
            step = self.step + 1
            begin = time.perf_counter()
            batch = await take_batch(
                state.generation,
                state.ledger,
                self._spec.algorithm,
                weight_version=step - 1 + state.version_offset,
                clock=self._clock,
                waits=self._waits,
                unless=self._pausing,
            )
            if batch is None:
                return
            self._doing = "TRAINING"
            await self._steps.begin(state, step, batch)
            await self._steps.train(state, step, batch, begin=begin)
            self.step = step
            if self._is_published(step):
                await self._publish(state, step)
            every = self._spec.trainer.checkpoint.every or self._spec.trainer.steps
            if (self._is_save_wanted or step % every == 0) and not self._is_done():
                await self._save(state)

    def _is_done(self) -> bool:
        return self._spec.validation.only or self.step >= self._spec.trainer.steps

    async def _save(self, state: Restored) -> None:
        """Save a checkpoint of the newest step."""
        self._is_save_wanted = False
        if self.step > 0:
            self._doing = "CHECKPOINTING"
            version = self.step + state.version_offset
            with self._waits("checkpoint"):
                await self._checkpoints.save(
                    state.parts.trainer,
                    state.parts.critic,
                    state.ledger,
                    step=self.step,
                    version=version,
                )

    def _is_published(self, step: int) -> bool:
        """Whether the weights of a step are published."""
        return step % self._spec.weight_sync.publish_every == 0 or step == self._spec.trainer.steps

    async def _publish(self, state: Restored, step: int) -> None:
        """Bring the weights of a step into service, then open the gate and evaluate if it is time."""
        self._doing = "SYNCING_WEIGHTS"
        with self._waits("weight_sync"):
            report = await state.parts.weights.publish(version := step + state.version_offset)
        if report.lost:
            raise UnavailableError(f"{', '.join(report.lost)} did not take part in weight sync")
        for worker in state.parts.serving:
            if not state.parts.replicas.is_lent(worker.worker_id):
                worker.weight_version = version
        state.parts.replicas.bring_back()
        state.progress.synced(report)
        message = f"weight version {version} is served by every rollout"
        facts = sync_facts(report)
        await self._note(state, "WeightsPublished", message, facts, weight_version=version)
        await self._open_gate(state, step)

    async def _open_gate(self, state: Restored, step: int) -> None:
        """Every rollout serves the weights of a step: generate and evaluate under them."""
        state.generation.published(step)
        await state.evaluator.published(
            step + state.version_offset, step=step, is_last=step == self._spec.trainer.steps
        )

    async def _note_evaluation(self, what: BegunEvaluation | Evaluation) -> None:
        assert self._state is not None
        if isinstance(what, BegunEvaluation):
            kind, message = "ValidationStarted", f"is being evaluated: {what.reason}"
        else:
            self._state.progress.evaluated(what)
            scores = f"greedy {what.greedy}, sampled {what.sampled}"
            kind, message = (
                "Validated",
                scores if what.status == "ok" else f"{what.status}, {scores}",
            )
        message = f"weight version {what.version}: {message}"
        await self._note(self._state, kind, message, asdict(what))

    async def _note(
        self,
        state: Restored,
        type_: str,
        message: str,
        data: Mapping[str, object],
        *,
        weight_version: int | None = None,
    ) -> None:
        note = Note(type_, message, data, None, weight_version, state.summary())
        await self._journal.note(note, state.ledger)
