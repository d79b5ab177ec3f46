"""Drives one run from admission to end, and restarts its loops after failures.

::

    the run is admitted                        -> its workers start; the loops are entered
    rollouts must restart with another precision   -> the loops are left; all rollouts end; they start and
                                                  the loops are entered again
    hosts are drained                          -> their workers move to other hosts (``drains.py``)
    a worker exits, is silent or is replaced   -> the loops are left; the missing workers start; the
                                                  loops are entered again. Lost rollouts are not
                                                  awaited while other rollouts remain: they join later.
    too many failures without a finished step  -> the run fails, with the first cause and the
                                                  log of each lost worker
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from functools import partial

from services.common.errors import ServiceError, UnavailableError
from services.common.lifetime import OUTAGE_EXIT
from services.common.runspec.run import RunSpec
from services.common.runspec.worker_kinds import worker_names
from services.common.runspec.workers import WORKERS
from services.common.stores import sample_reports
from services.common.task_group import TaskGroup, leaves, until_first, unwrapped
from services.controller.launch.launcher import WorkerExit, log_command
from services.controller.rules.run_state import VOLATILE, RunEvent, RunState
from services.controller.run.connections import delete_sample_records
from services.controller.run.lifecycle.drains import (
    DrainedHost,
    HostDrainedError,
    HostDrains,
    left_note,
    withdrawn_note,
)
from services.controller.run.lifecycle.elastic import ElasticSizing, SizeChangedError
from services.controller.run.lifecycle.loop import Services, connected, train
from services.controller.run.pipeline import TrainingPipeline
from services.controller.run.state.journal import Journal
from services.controller.run.state.requests import CurrentSpec, RequestQueue
from services.controller.run.state.worker_failures import (
    RolloutsOutdatedError,
    UnpublishableError,
    UnresponsiveError,
    WorkerLostError,
    explain,
    find_fatal,
    is_worker_failure,
)
from services.controller.store.records import Note
from services.wire.controller import GroupFailure

logger = logging.getLogger(__name__)

# A broken call is the first sign of a dead worker; its exit report, which says more, follows within
# this time.
_EXIT_REPORT_S = 2.0

_PLANNED = (SizeChangedError, RolloutsOutdatedError, HostDrainedError)
# Errors after which the loops may be entered again.
_LEAVING_ERRORS = (ServiceError, WorkerLostError, *_PLANNED)

Transition = Callable[[RunEvent, str, str], Awaitable[RunState]]
"""Applies an event to the run's state (event, reason, message) and returns the new state."""


class RunDriver:
    """Drives one run: starts workers, enters the loops, recovers from failures.

    Args:
        move: Applies an event to the state.
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
        self._ended: set[str] = set()
        self._lost = asyncio.Event()
        self._is_hopeless = False
        self._final_code = ""
        self._is_over = False
        self._deadline: asyncio.TimerHandle | None = None
        self._losses, self._step_at_loss = 0, -1
        self._open_loss: tuple[str, Collection[str]] | None = None
        """Message and workers of a counted loss without an event, as its workers may turn out to be lost."""
        self._sizing = ElasticSizing(
            run_id,
            self._spec,
            launcher=services.launcher,
            membership=services.membership,
            journal=journal,
            request_queue=request_queue,
        )
        self._drains = HostDrains()
        self._sizing.on_left = self._record_left
        self._restarted: set[str] = set()
        """Workers that this driver has ended, so that they know nothing until they have loaded."""
        self._may_leave: set[str] = set()
        """Workers that have nothing to lose, so that they leave their hosts once the loops are left."""
        self.task: asyncio.Task[None] | None = None

    async def drive(self) -> None:
        """Drives the run to its end.

        Raises:
            LeaseLostError: If another controller is the leader and drives the run now.
            DatabaseError: If the database is unavailable; the run resumes when this process
                restarts.
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
            if (fatal := find_fatal(errors)) is not None:
                raise fatal from error
            reason, message = explain(errors)
            logger.exception("run failed", extra={"run": self._run_id, "reason": reason})
        if self._is_cancelled:
            event, reason = RunEvent.STOPPED, "CancelledByUser"
        self._is_over = True
        await self._clean_up(record_samples=event is RunEvent.DRAINED)
        await self._close_open_loss()
        if reason == "ControllerStopped":
            if self._state is RunState.STARTING:
                return  # the next controller starts it again
            if self._state is RunState.RUNNING:
                await self._transition(RunEvent.PAUSE, reason)
        await self._transition(event, reason, message)

    @property
    def spec(self) -> RunSpec:
        return self._spec.now

    def newer_spec(self, digest: str) -> tuple[str, str]:
        """Returns canonical JSON and digest of the specification; empty strings if ``digest`` is current."""
        return ("", "") if digest == self._spec.digest else (self._spec.text, self._spec.digest)

    def detach(self) -> None:
        """Stops driving the run; a later controller resumes it."""
        self._cancel()

    def suspend(self) -> None:
        """Stops the workers at once and pauses the run, which later resumes from its newest checkpoint."""
        self._is_suspended = True
        self._cancel()

    async def end(self, *, grace_s: float = 0.0, saves: bool = False) -> None:
        """Cancels the run, at once or after its current step.

        Args:
            grace_s: Seconds within which the step may finish; 0 cancels at once, also after an
                earlier call with a longer grace.
            saves: True if a checkpoint is saved after the step.
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
        # The clean-up itself is never cancelled: it releases what the run holds.
        if self.task is not None and not self._is_over and not self.task.cancelling():
            self.task.cancel()

    async def pause(self, *, saves: bool = True) -> None:
        """Finishes the step, saves a checkpoint if ``saves`` is set, and stops the workers."""
        self._state = RunState.PAUSING
        await self._request_queue.put("pause", checkpoint=saves)

    async def change(self, spec: RunSpec) -> None:
        """Applies a changed specification to the running run."""
        is_resized = spec.rollout.replicas != self.spec.rollout.replicas
        self._spec.now = spec
        await self._services.membership.recheck()
        if is_resized:
            await self._request_queue.put("resize", has=self._sizing.size)
            self._sizing.notify()

    def activities(self) -> list[str]:
        return self._pipeline.activities() if self._pipeline is not None else []

    async def record_event(self, note: Note, *, key: str = "") -> None:
        """Adds an event to the run's record, only once if its data has a ``key``."""
        if key:
            await self._journal.record_once(note, key)
        else:
            await self._journal.record_event(note)

    async def save(self) -> None:
        """Requests a checkpoint at the end of the current step."""
        await self._request_queue.put("save")

    async def evaluate(self) -> None:
        """Requests an evaluation of the served weights."""
        await self._request_queue.put("evaluate")
        if self._pipeline is not None:
            await self._pipeline.evaluator.evaluate_served()

    async def report_failures(self, failures: Sequence[GroupFailure]) -> None:
        """Processes reports of groups that produced no samples.

        Raises:
            UnavailableError: If the run is still being restored; the worker sends the report again.
        """
        if self._pipeline is None:
            raise UnavailableError("the run is being restored; report again")
        await self._pipeline.fail(failures)

    def host_drained(self, host: DrainedHost, worker_ids: Collection[str]) -> None:
        """Records workers that must leave a host; a repetition tries again what an obstacle prevented."""
        self._drains.add(host, worker_ids)

    def host_in_service(self, host: str) -> Note | None:
        """Lets workers stay on a host that is in service again, unless they are leaving already.

        Returns:
            Its event; None if no worker had to leave.
        """
        staying = self._drains.withdraw(host)
        self._sizing.stay(staying)
        return withdrawn_note(host, staying) if staying else None

    def worker_exited(self, exit_: WorkerExit) -> None:
        if self._sizing.handles_exit(exit_):
            return
        worker = self._services.membership.find(self._run_id, exit_.worker_id)
        had_loaded = worker is not None and worker.state != "loading"
        was_interrupted = exit_.code is None or exit_.code < 0 or exit_.code == OUTAGE_EXIT
        # At the run's start, a worker that fails by itself before it has loaded would fail again. Later,
        # a slow machine or an occupied port is the more likely cause, and the number of restarts is
        # limited.
        is_first = self._state is RunState.STARTING
        self._is_hopeless |= is_first and not (had_loaded or was_interrupted)
        self.worker_lost(exit_.worker_id, exit_.report())

    def worker_lost(
        self, worker_id: str, message: str, *, is_replaced: bool = False, final_code: str = ""
    ) -> None:
        """Records a lost worker and wakes the recovery, unless that is removing it already.

        Args:
            message: Cause, for people.
            is_replaced: True if another process has registered under the same name.
            final_code: Code with which the run ends; empty if another start may succeed.
        """
        self._final_code = self._final_code or final_code
        if worker_id in self._ended and worker_id not in self._exits:
            return  # a report would count for the next loss
        self._exits[worker_id] = message
        if not is_replaced:
            self._ended.add(worker_id)
        self._lost.set()

    async def _work(self) -> tuple[RunEvent, str]:
        """Enters the loops, again after each failure; returns how the run ended."""
        exits: dict[str, str] = {}
        await self._request_queue.open()
        await self._warn_of_volatile_checkpoints()
        self._sizing.resume_request()
        if self._state is RunState.PAUSING and not self._request_queue.pausing.is_set():
            await self._request_queue.put("pause", checkpoint=True)
        while True:
            self._lost.clear()
            exits |= await self._end_outdated_rollouts()
            await self._start_workers()
            self._pipeline = None
            try:
                is_finished = await self._run_loops(exits)
            except (*_LEAVING_ERRORS, ExceptionGroup) as error:
                exits = await self._handle_loss(error)
                continue
            if is_finished:
                return RunEvent.FINISH, "Completed"
            if self._request_queue.get("pause") is not None:
                return RunEvent.DRAINED, "PausedByUser"
            exits = await self._leave_hosts()

    async def _start_workers(self) -> None:
        """Starts missing workers, which may wait for a host; others may have to leave theirs meanwhile.

        Colocated workers start later, one by one, while the others sleep.
        """
        while not self.spec.topology.is_colocated:
            spec = self._sizing.startable_spec()
            with unwrapped():
                starting, _ = await until_first(
                    self._services.launcher.start(self._run_id, spec), self._await_leaving()
                )
            if not starting.cancelled():
                return
            await self._leave_hosts()

    async def _await_leaving(self) -> None:
        """Waits for a drained host whose workers have nothing to lose."""
        while True:
            leaving = self._drains.leaving()
            if leaving and not self._has_state(leaving):
                await self._report_drain()
                self._may_leave = leaving
                return
            self._drains.changed.clear()
            await self._drains.changed.wait()

    async def _warn_of_volatile_checkpoints(self) -> None:
        """Records, when the run starts, that its checkpoints are lost with the trainer."""
        checkpoint = self.spec.trainer.checkpoint
        if self._state is not RunState.STARTING or self.spec.validation.only:
            return
        why = await self._services.launcher.why_volatile(self._run_id, checkpoint.directory)
        if why:
            message = (
                f"checkpoints are lost with the trainer, and the run then starts again from step 0: {why}; "
                "keep them on a claim (workers.checkpoints.existingClaim of the chart), or set "
                "trainer.checkpoint.directory to a folder of one"
            )
            await self._journal.record_event(
                Note("CheckpointsVolatile", message, {"reason": VOLATILE})
            )

    async def _run_loops(self, lost_workers: Collection[str]) -> bool:
        pipeline: asyncio.Future[TrainingPipeline] = asyncio.get_running_loop().create_future()
        present, absent = self._sizing.present(), self._sizing.missing_rollouts()
        async with TaskGroup() as tasks:
            watches = [
                tasks.create_task(self._watch_workers()),
                tasks.create_task(self._sizing.watch(present, pipeline=pipeline)),
                tasks.create_task(self._watch_drains(pipeline)),
            ]
            async with connected(
                self._spec,
                self._services,
                journal=self._journal,
                request_queue=self._request_queue,
                present=present,
                lost_workers=lost_workers,
            ) as self._pipeline:
                await self._ready(absent)
                pipeline.set_result(self._pipeline)
                is_finished = await train(self._pipeline)
            for watch in watches:
                watch.cancel()
        return is_finished

    async def _ready(self, absent: Collection[str]) -> None:
        await self._close_open_loss()
        absent_workers = sorted(absent)
        names = ", ".join(absent_workers)
        message = f"continues without {names}" if names else "all workers have loaded"
        data: dict[str, object] = {"absent": absent_workers}
        if self._state is RunState.STARTING:
            workers = self._services.membership.workers(self._run_id)
            data["start_seconds"] = {worker.worker_id: worker.start_seconds() for worker in workers}
        await self._journal.record_event(Note("WorkersReady", message, data))
        if not absent_workers:
            await self._sizing.confirm()
        if self._state is RunState.STARTING:
            await self._transition(RunEvent.READY, "WorkersReady")
        elif self._state is RunState.RECOVERING:
            await self._transition(RunEvent.RECOVER, "WorkersReady")

    async def _handle_loss(self, error: Exception) -> dict[str, str]:
        """Records lost workers and cleans up after them; raises ``error`` if the run cannot recover."""
        broken = leaves(error)
        errors = [cause for cause in broken if not isinstance(cause, _PLANNED)]
        if not is_worker_failure(errors):
            raise error
        if len(errors) < len(broken) and not self._exits:
            # All other errors are consequences of leaving the loops.
            if self._request_queue.get("restart_rollouts") is not None:
                if self._state is RunState.RUNNING:
                    await self._transition(RunEvent.LOSE, "RolloutsRestart")
                return {}
            if any(isinstance(cause, HostDrainedError) for cause in broken):
                return await self._leave_hosts()
            return await self._sizing.remove_surplus()
        self._note_silent(errors)
        await self._await_exit_report()
        exits, self._exits = self._exits, {}
        if self._open_loss is not None and not exits.keys().isdisjoint(self._open_loss[1]):
            self._open_loss = None  # the same loss, now with its worker
        else:
            await self._close_open_loss()
            self._count_loss()
        message = "\n".join(exits.values())
        message = message or self._with_log("; ".join(dict.fromkeys(str(e) for e in errors)))
        is_final = self._is_hopeless or self._final_code != ""
        if is_final or self._losses > self.spec.limits.max_restarts:
            raise WorkerLostError(message, code=self._final_code or "WorkerLost") from error
        logger.warning(
            "run recovers from a lost worker", extra={"run": self._run_id, "why": message}
        )
        unpublishable = next((e for e in errors if isinstance(e, UnpublishableError)), None)
        if unpublishable is not None and not exits:
            self._open_loss = (message, unpublishable.worker_ids)
        else:
            await self._record_loss(message, exits)
        await self._remove_ended()
        is_halted = not exits or "trainer-0" in exits or not self._rollouts()
        if is_halted and self._state in (RunState.STARTING, RunState.RUNNING):
            await self._transition(RunEvent.LOSE, "WorkerLost", message.splitlines()[0])
        return exits

    async def _close_open_loss(self) -> None:
        """Records the open loss, of which no worker was lost after all."""
        loss, self._open_loss = self._open_loss, None
        if loss is not None:
            await self._record_loss(loss[0], ())

    async def _record_loss(self, message: str, worker_ids: Collection[str]) -> None:
        note = Note("WorkerLost", message, {"workers": sorted(worker_ids)})
        await self._journal.record_event(note)

    def _note_silent(self, errors: Sequence[BaseException]) -> None:
        """Records silent workers: rollouts, and a trainer if a rank is silent when the loops are entered.

        Otherwise a trainer counts as lost only without heartbeats: its restart may lose trained steps.
        """
        for cause in errors:
            if isinstance(cause, UnresponsiveError):
                worker_id, _, rank = cause.worker_id.partition("/")
                if worker_id in self._rollouts() or (rank and self._pipeline is None):
                    self.worker_lost(worker_id, self._with_log(str(cause)))

    async def _watch_drains(self, entered: asyncio.Future[TrainingPipeline]) -> None:
        """Moves workers away from drained hosts, and ends the steps if they cannot leave meanwhile.

        Args:
            entered: Pipeline of the run; done once the loops are entered.

        Raises:
            HostDrainedError: If workers leave at once, because they have nothing to lose.
        """
        while True:
            self._drains.changed.clear()
            if (leaving := self._drains.leaving()) and not self._drains.is_held:
                if self._has_state(leaving):
                    await asyncio.shield(entered)
                if leaving := self._drains.leaving():  # a host may be in service again
                    await self._clear_hosts(leaving, entered)
            await self._drains.changed.wait()

    def _has_state(self, worker_ids: Collection[str]) -> bool:
        """Returns True if a worker, other than a rollout, may know steps that no checkpoint has."""
        return self._state is not RunState.STARTING and any(map(self._may_know_steps, worker_ids))

    def _may_know_steps(self, worker_id: str) -> bool:
        if worker_id.startswith("rollout-"):
            return False
        worker = self._services.membership.find(self._run_id, worker_id)
        if worker is None:  # after the controller's restart, it may not have registered again
            return worker_id not in self._restarted
        return worker.state != "loading"

    async def _clear_hosts(
        self, leaving: set[str], entered: asyncio.Future[TrainingPipeline]
    ) -> None:
        """Moves rollouts while others generate; otherwise ends the steps, after which all leave.

        Raises:
            HostDrainedError: If the workers leave at once, because they have nothing to lose.
        """
        rollouts = set(self._rollouts())
        if entered.done() and leaving <= rollouts and rollouts - leaving:
            await self._report_drain()
            self._sizing.move(leaving)
            return
        if self._has_state(leaving) and entered.result().step > 0:
            folder = self.spec.trainer.checkpoint.directory
            if why := await self._services.launcher.why_volatile(self._run_id, folder):
                await self._report_drain(
                    "CheckpointsVolatile",
                    f"their checkpoints would be lost with them ({why}); pause or cancel the run to let the "
                    "drain end",
                )
                return
        await self._report_drain()
        self._may_leave = leaving
        if self.spec.validation.only or not entered.done():
            raise HostDrainedError
        self._request_queue.pausing.set()

    async def _report_drain(self, obstacle: str = "", why: str = "") -> None:
        if (note := self._drains.note(obstacle=obstacle, why=why)) is not None:
            await self._journal.record_event(note)

    async def _leave_hosts(self) -> dict[str, str]:
        """Ends workers on drained hosts after the loops are left; returns them with the cause.

        No worker leaves if the last step is not saved, because a trainer would lose it.
        """
        leaving, self._may_leave = self._may_leave & self._drains.leaving(), set()
        self._request_queue.resume_steps()
        pipeline = self._pipeline
        if self._has_state(leaving) and pipeline is not None and not await pipeline.is_saved():
            message = (
                f"the checkpoint of step {pipeline.step} failed; it is tried again each minute"
            )
            await self._report_drain("CheckpointFailed", message)
            return {}
        if not leaving:
            return {}
        cause = f"{', '.join(sorted(leaving))} leave their hosts"
        if self._state is RunState.RUNNING:
            await self._transition(RunEvent.LOSE, "HostDrained", cause)
        await self._services.launcher.release(self._run_id, leaving)
        self._restarted |= leaving
        for worker_id in sorted(leaving):
            await self._services.membership.unregister(self._run_id, worker_id)
        await self._record_left(leaving)
        return dict.fromkeys(leaving, cause)

    async def _record_left(self, worker_ids: Collection[str]) -> None:
        leaving = self._drains.leaving().intersection(worker_ids)
        if hosts := self._drains.left(leaving):
            await self._journal.record_event(left_note(hosts, leaving))

    async def _end_outdated_rollouts(self) -> dict[str, str]:
        """Ends all rollouts if they must restart; returns them with the cause."""
        request = self._request_queue.get("restart_rollouts")
        if request is None:
            return {}
        names = [name for role, name in worker_names(self.spec) if role == "rollout"]
        for name in names:
            await self._services.launcher.end(self._run_id, name)
            await self._services.membership.unregister(self._run_id, name)
        note = Note("RolloutsRestarted", "with the changed specification", {"workers": names})
        await self._journal.record_event(note, also=self._request_queue.done(request))
        return dict.fromkeys(names, "restarts with the changed specification")

    def _count_loss(self) -> None:
        """Counts the failures since the last finished step."""
        step = self._pipeline.step if self._pipeline is not None else 0
        self._losses = 1 if step > self._step_at_loss else self._losses + 1
        self._step_at_loss = step

    async def _remove_ended(self) -> None:
        """Removes processes and registrations of lost workers."""
        self._restarted |= self._ended
        for worker_id in self._ended:
            await self._services.launcher.end(self._run_id, worker_id)
            await self._services.membership.unregister(self._run_id, worker_id)
        self._sizing.stay(self._ended)  # their replacements are on other hosts
        await self._record_left(self._ended)
        self._ended.clear()

    def _rollouts(self) -> list[str]:
        workers = self._services.membership.workers(self._run_id, "rollout")
        return [worker.worker_id for worker in workers]

    async def _await_exit_report(self) -> None:
        """Waits for the report that names the lost worker; longer while a worker stores its work."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_REPORT_S):
                await self._lost.wait()
        if not self._exits:
            await self._services.launcher.report_lost_hosts(self._run_id)
        # A worker refuses calls a moment before its state says that it is leaving.
        workers = self._services.membership.workers(self._run_id)
        if any(worker.state == "draining" for worker in workers):
            with suppress(TimeoutError):
                async with asyncio.timeout(self._services.heartbeat_timeout_s):
                    await self._lost.wait()

    async def _watch_workers(self) -> None:
        """Raises WorkerLostError if a worker exits or sends no heartbeats."""
        timeout_s = self._services.heartbeat_timeout_s
        self._services.membership.start_supervision(self._run_id)
        while True:
            try:
                async with asyncio.timeout(timeout_s / 2):
                    await self._lost.wait()
                raise WorkerLostError("\n".join(self._exits.values()))
            except TimeoutError:
                for worker in self._services.membership.find_silent(self._run_id):
                    message = f"{worker.worker_id} sent no heartbeat for {timeout_s:.0f} s"
                    self.worker_lost(worker.worker_id, self._with_log(message))

    def _with_log(self, message: str) -> str:
        """Adds the command that shows the log of the worker in a message, which may say why it is silent."""
        worker = re.search(rf"\b(?:{'|'.join(WORKERS)})-\d+\b", message)
        return f"{message} (log: {log_command(self._run_id, worker[0])})" if worker else message

    async def _clean_up(self, *, record_samples: bool) -> None:
        try:
            await self._services.membership.end_run(self._run_id)
            await self._services.launcher.stop(self._run_id)
        finally:
            await self._services.membership.close_run(self._run_id)
        if not record_samples:
            await delete_sample_records(self._services.queue, self._run_id)
            if reports := sample_reports(self.spec.samples.directory):
                upload = partial(self._services.queue.sample_upload, self._run_id)
                await reports(upload, self.record_event).record_end()

    async def _transition(self, event: RunEvent, reason: str, message: str = "") -> None:
        self._state = await self._move(event, reason, message)
