"""Drives one run from its admission to its end.

workers of the run                         -> started; the loop is entered
a worker ended, is silent or was replaced  -> the loop is left; what is gone is started; it is entered again,
                                              without lost rollouts while others are left; they join later
too many losses without a finished step    -> the run fails, with the last lines of what was lost
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress

from services.common.errors import ServiceError, UnavailableError
from services.common.runspec.run import RunSpec
from services.common.task_group import TaskGroup, leaves
from services.controller.client import GroupFailure
from services.controller.launch.launcher import WorkerExit
from services.controller.rules.run_state import RunEvent, RunState
from services.controller.run.connections import forget_samples
from services.controller.run.lifecycle.elastic import ElasticSizing, SizeChangedError
from services.controller.run.lifecycle.loop import Services, connected, train
from services.controller.run.pipeline import TrainingPipeline
from services.controller.run.state.journal import Journal
from services.controller.run.state.requests import CurrentSpec, RequestQueue
from services.controller.run.state.worker_failures import (
    UnansweringError,
    WorkerLostError,
    ends_the_process,
    explain,
    is_worker_failure,
)
from services.controller.store.records import Note

logger = logging.getLogger(__name__)

# A worker's death shows as a broken call first; its exit, which says more, comes within this time.
_EXIT_REPORT_S = 2.0

Transition = Callable[[RunEvent, str, str], Awaitable[RunState]]
"""Moves the run (event, reason, message); returns its new state."""


class RunDriver:
    """Drives one run.

    Args:
        run_id: The run.
        spec: Its specification.
        services: What every run needs.
        journal: The run's record.
        request_queue: What it is asked for.
        state: Where the run is in its life.
        move: Moves it.
    """

    def __init__(
        self,
        run_id: str,
        spec: RunSpec,
        services: Services,
        *,
        journal: Journal,
        request_queue: RequestQueue,
        state: RunState,
        move: Transition,
    ) -> None:
        self._run_id = run_id
        self._spec = CurrentSpec(spec)
        self._services = services
        self._journal = journal
        self._request_queue = request_queue
        self._state = state
        self._move = move
        self._pipeline: TrainingPipeline | None = None
        self._is_cancelled = False
        self._is_suspended = False
        self._exits: dict[str, str] = {}
        self._vacant: set[str] = set()
        self._lost = asyncio.Event()
        self._is_hopeless = False
        self._is_over = False
        self._deadline: asyncio.TimerHandle | None = None
        self._losses, self._step_at_loss = 0, -1
        self._resizing = ElasticSizing(
            run_id,
            self._spec,
            launcher=services.launcher,
            membership=services.membership,
            journal=journal,
            request_queue=request_queue,
        )
        self.task: asyncio.Task[None] | None = None

    async def drive(self) -> None:
        """Drive the run to its end.

        Raises:
            LeaseLostError: If another controller leads: it drives the run now.
            DatabaseError: If the database is away: the run goes on when this process is started again.
        """
        event, reason, message = RunEvent.FAIL, "InternalError", ""
        try:
            if self._state is RunState.CANCELLING:
                event, reason = RunEvent.STOPPED, "CancelledByUser"
            else:
                self._services.membership.open_run(self._run_id)
                event, reason = await self._work()
        except asyncio.CancelledError:
            if not (self._is_cancelled or self._is_suspended):
                raise
            event, reason = RunEvent.DRAINED, "ControllerStopped"
        except Exception as error:
            errors = leaves(error)
            if (fatal := ends_the_process(errors)) is not None:
                raise fatal from error
            reason, message = explain(errors)
            logger.exception("run failed", extra={"run": self._run_id, "reason": reason})
        if self._is_cancelled:
            event, reason = RunEvent.STOPPED, "CancelledByUser"
        self._is_over = True
        await self._end(keep_samples=event is RunEvent.DRAINED)
        if reason == "ControllerStopped":
            if self._state is RunState.STARTING:
                return  # it starts again with the next controller
            if self._state is RunState.RUNNING:
                await self._go(RunEvent.PAUSE, reason)
        await self._go(event, reason, message)

    @property
    def spec(self) -> RunSpec:
        """The run's specification, as it is now."""
        return self._spec.now

    def newer_spec(self, digest: str) -> tuple[str, str]:
        """The specification as canonical JSON and its digest, if a worker has another one; else empty."""
        return ("", "") if digest == self._spec.digest else (self._spec.text, self._spec.digest)

    def leave(self) -> None:
        """Stop driving; a later controller goes on."""
        self._cancel()

    def suspend(self) -> None:
        """Stop the workers and pause where the run is: it goes on from its newest checkpoint."""
        self._is_suspended = True
        self._cancel()

    async def end(self, *, grace_s: float = 0.0, saves: bool = False) -> None:
        """End the run: at once, or behind its current step if that is done within the grace.

        Args:
            grace_s: Seconds for the step; 0 ends the run at once, also one that was given more before.
            saves: Whether a checkpoint is saved behind the step.
        """
        self._is_cancelled = True
        if self._deadline is not None:
            self._deadline.cancel()
        if grace_s <= 0 or self._state is not RunState.RUNNING:
            self._cancel()
            return
        self._deadline = asyncio.get_running_loop().call_later(grace_s, self._cancel)
        await self._request_queue.put("pause", checkpoint=saves)

    def _cancel(self) -> None:
        # The end itself is never cancelled: it gives back what the run holds.
        if self.task is not None and not self._is_over and not self.task.cancelling():
            self.task.cancel()

    async def pause(self, *, saves: bool = True) -> None:
        """Finish the step, save a checkpoint if it is wanted, and stop the workers."""
        self._state = RunState.PAUSING
        await self._request_queue.put("pause", checkpoint=saves)

    async def change(self, spec: RunSpec) -> None:
        """Go on under a changed specification."""
        is_resized = spec.rollout.replicas != self.spec.rollout.replicas
        self._spec.now = spec
        await self._services.membership.recheck()
        if is_resized:
            await self._request_queue.put("resize", has=self._resizing.size)
            self._resizing.ask()

    def activities(self) -> list[str]:
        """What the run is doing now."""
        return self._pipeline.activities() if self._pipeline is not None else []

    async def note(self, note: Note) -> None:
        """Add an event to the run's record."""
        await self._journal.note(note)

    async def save(self) -> None:
        """Save a checkpoint at the end of the current step."""
        await self._request_queue.put("save")

    async def evaluate(self) -> None:
        """Evaluate the weights that are served."""
        await self._request_queue.put("evaluate")
        if self._pipeline is not None:
            await self._pipeline.evaluator.trigger()

    async def report_failures(self, failures: Sequence[GroupFailure]) -> None:
        """Take in groups that brought no samples.

        Raises:
            UnavailableError: If it is not known yet what is in flight; the worker asks again.
        """
        if self._pipeline is None:
            raise UnavailableError("the run is being restored; report again")
        await self._pipeline.fail(failures)

    def worker_exited(self, exit_: WorkerExit) -> None:
        """A worker ended by itself."""
        if self._resizing.takes_exit(exit_):
            return
        known = self._services.membership.find(self._run_id, exit_.worker_id)
        had_loaded = known is not None and known.state in ("loaded", "ready", "draining")
        is_killed = exit_.code is None or exit_.code < 0
        is_absent = exit_.worker_id in self._resizing.absent()
        others_go_on = is_absent and self._state is RunState.RUNNING
        # A worker that gives up before it has loaded would do so again, for which the others need not end.
        self._is_hopeless |= not (had_loaded or is_killed or others_go_on)
        message = f"{exit_.worker_id} ended {exit_.how}; its last lines:\n{exit_.last_lines}"
        self.worker_lost(exit_.worker_id, message)

    def worker_lost(self, worker_id: str, message: str, *, is_replaced: bool = False) -> None:
        """A worker's process is gone; ``is_replaced``: another one has registered in its place."""
        self._exits[worker_id] = message
        if not is_replaced:
            self._vacant.add(worker_id)
        self._lost.set()

    async def _work(self) -> tuple[RunEvent, str]:
        """Enter the loop, again after each loss; returns how the run ended."""
        lost: dict[str, str] = {}
        await self._request_queue.open()
        self._resizing.begin()
        if self._state is RunState.PAUSING and not self._request_queue.pausing.is_set():
            await self._request_queue.put("pause", checkpoint=True)
        while True:
            self._lost.clear()
            if not self.spec.topology.is_colocated:  # there, each starts while the others sleep
                await self._services.launcher.start(self._run_id, self._resizing.sure())
            self._pipeline = None
            try:
                is_finished = await self._enter(lost)
            except (ServiceError, WorkerLostError, SizeChangedError, ExceptionGroup) as error:
                lost = await self._take_loss(error)
                continue
            if is_finished:
                return RunEvent.FINISH, "Completed"
            return RunEvent.DRAINED, "PausedByUser"

    async def _enter(self, lost: Collection[str]) -> bool:
        pipeline: asyncio.Future[TrainingPipeline] = asyncio.get_running_loop().create_future()
        present, absent = self._resizing.present(), self._resizing.absent()
        async with TaskGroup() as tasks:
            watches = [
                tasks.create_task(self._watch_workers()),
                tasks.create_task(self._resizing.watch(present, pipeline=pipeline)),
            ]
            async with connected(
                self._spec,
                self._services,
                journal=self._journal,
                request_queue=self._request_queue,
                present=present,
                lost_workers=lost,
            ) as self._pipeline:
                await self._ready(absent)
                pipeline.set_result(self._pipeline)
                is_finished = await train(self._pipeline)
            for watch in watches:
                watch.cancel()
        return is_finished

    async def _ready(self, absent: Collection[str]) -> None:
        missing = sorted(absent)
        message = f"goes on without {', '.join(missing)}" if missing else "all workers have loaded"
        await self._journal.note(Note("WorkersReady", message, {"absent": missing}))
        if not missing:
            await self._resizing.confirm()
        if self._state is RunState.STARTING:
            await self._go(RunEvent.READY, "WorkersReady")
        elif self._state is RunState.RECOVERING:
            await self._go(RunEvent.RECOVER, "WorkersReady")

    async def _take_loss(self, error: Exception) -> dict[str, str]:
        """Note what was lost and make room for its replacement; raise if the run cannot go on."""
        broken = leaves(error)
        errors = [each for each in broken if not isinstance(each, SizeChangedError)]
        if not is_worker_failure(errors):
            raise error
        if len(errors) < len(broken) and not self._exits:
            # Whatever else broke did so because the loop was left.
            return await self._resizing.settle()
        for each in errors:
            # The trainer has more to lose than time, so only its heartbeats tell that it is gone.
            if isinstance(each, UnansweringError) and each.worker_id in self._rollouts():
                self.worker_lost(each.worker_id, str(each))
        await self._await_exit_report()
        self._count_loss()
        lost, self._exits = self._exits, {}
        message = "\n".join(lost.values()) or "; ".join(dict.fromkeys(str(e) for e in errors))
        if self._is_hopeless or self._losses > self.spec.limits.max_restarts:
            raise WorkerLostError(message) from error
        logger.warning("run goes on after a loss", extra={"run": self._run_id, "why": message})
        await self._journal.note(Note("WorkerLost", message, {"workers": sorted(lost)}))
        await self._clear_vacant()
        is_halted = "trainer-0" in lost or not self._rollouts()
        if is_halted and self._state in (RunState.STARTING, RunState.RUNNING):
            await self._go(RunEvent.LOSE, "WorkerLost", message.splitlines()[0])
        return lost

    def _count_loss(self) -> None:
        """Count the losses since a step was finished."""
        step = self._pipeline.step if self._pipeline is not None else 0
        self._losses = 1 if step > self._step_at_loss else self._losses + 1
        self._step_at_loss = step

    async def _clear_vacant(self) -> None:
        """Remove what is left of workers that are gone."""
        for worker_id in self._vacant:
            await self._services.launcher.end(self._run_id, worker_id)
            await self._services.membership.forget(self._run_id, worker_id)
        self._vacant.clear()

    def _rollouts(self) -> list[str]:
        workers = self._services.membership.workers(self._run_id, "rollout")
        return [worker.worker_id for worker in workers]

    async def _await_exit_report(self) -> None:
        workers = self._services.membership.workers(self._run_id)
        is_leaving = any(worker.state == "draining" for worker in workers)
        limit_s = self._services.heartbeat_timeout_s if is_leaving else _EXIT_REPORT_S
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._lost.wait()

    async def _watch_workers(self) -> None:
        """Raise when a worker ends or falls silent."""
        timeout_s = self._services.heartbeat_timeout_s
        self._services.membership.begin_watch(self._run_id)
        while True:
            try:
                async with asyncio.timeout(timeout_s / 2):
                    await self._lost.wait()
                raise WorkerLostError("\n".join(self._exits.values()))
            except TimeoutError:
                for worker in self._services.membership.silent(self._run_id):
                    self.worker_lost(
                        worker.worker_id,
                        f"{worker.worker_id} sent no heartbeat for {timeout_s:.0f} s",
                    )

    async def _end(self, *, keep_samples: bool) -> None:
        await self._services.membership.close_run(self._run_id)
        await self._services.launcher.stop(self._run_id)
        if not keep_samples:
            await forget_samples(self._services.queue, self._run_id)

    async def _go(self, event: RunEvent, reason: str, message: str = "") -> None:
        self._state = await self._move(event, reason, message)
