"""Runs and their life: created, driven by a loop each, ended, always with a stated reason."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from services.common.clock import Clock
from services.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    ServiceError,
    UnavailableError,
)
from services.common.ids import new_run_id
from services.common.spec.loader import canonical_json, parse_spec, spec_digest
from services.common.spec.run import RunSpec
from services.controller.client import GroupFailure
from services.controller.launcher import Launcher, WorkerExit
from services.controller.loop import RunLoop
from services.controller.membership import Membership, Worker
from services.controller.run_state import RunEvent, RunState
from services.controller.store import Event, Run, RunStore
from services.transferqueue.client import TransferQueueClient

logger = logging.getLogger(__name__)

_PAGE = 500
# A worker's death shows as a broken call first; its exit, which says more, comes within this time.
_EXIT_REPORT_S = 2.0


class WorkerLostError(RuntimeError):
    """A worker of a run is gone."""


@dataclass(slots=True)
class _Active:
    loop: RunLoop
    task: asyncio.Task[None] | None = None
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    lost_message: str = ""


class RunManager:
    """Creates, drives and ends runs.

    Args:
        store: Durable state.
        membership: Where workers register.
        queue: The transferqueue.
        clock: For stalls.
        tasks: Owns the loops of the runs.
        heartbeat_timeout_s: A worker silent for longer counts as lost.
    """

    def __init__(
        self,
        *,
        store: RunStore,
        membership: Membership,
        queue: TransferQueueClient,
        clock: Clock,
        tasks: asyncio.TaskGroup,
        heartbeat_timeout_s: float,
    ) -> None:
        self._store = store
        self._membership = membership
        self._queue = queue
        self._clock = clock
        self._tasks = tasks
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._active: dict[str, _Active] = {}
        self._changed = asyncio.Condition()
        self.launcher: Launcher

    async def create(self, spec: RunSpec, *, request_id: str | None = None) -> tuple[Run, bool]:
        """Store a run and start driving it.

        Returns:
            The run, and whether it is new: a ``request_id`` seen before returns its run.
        """
        run, is_new = self._store.create(
            new_run_id(),
            name=spec.name,
            spec_json=canonical_json(spec),
            spec_digest=spec_digest(spec),
            request_id=request_id,
        )
        if is_new:
            loop = RunLoop(
                run.run_id,
                spec,
                membership=self._membership,
                queue=self._queue,
                clock=self._clock,
                record=lambda *args, **kwargs: self._record(run.run_id, *args, **kwargs),
            )
            active = self._active[run.run_id] = _Active(loop)
            active.task = self._tasks.create_task(self._drive(run.run_id, spec, active))
        return run, is_new

    def get(self, run_id: str) -> Run:
        """One run."""
        return self._store.get(run_id)

    def spec_of(self, run_id: str) -> RunSpec:
        """The specification of a run."""
        return parse_spec(self._store.get(run_id).spec_json)

    def workers(self, run_id: str) -> list[Worker]:
        """Registered workers of a run, by name."""
        self._store.get(run_id)
        return self._membership.workers(run_id)

    def list_runs(self, *, limit: int, before: str | None = None) -> list[Run]:
        """Runs, newest first."""
        return self._store.list_runs(limit=limit, before=before)

    async def cancel(self, run_id: str) -> Run:
        """End a run. Cancelling a cancelled run changes nothing.

        Raises:
            FailedPreconditionError: If it ended in another way.
        """
        run = self._store.get(run_id)
        if run.state in (RunState.CANCELLED, RunState.CANCELLING):
            return run
        run = self._store.apply(run_id, RunEvent.CANCEL, reason="CancelledByUser")
        await self._notify()
        active = self._active.get(run_id)
        if active is not None and active.task is not None:
            active.task.cancel()
            if run.is_terminal:  # it was cancelled before its loop began, so that no loop cleans up
                del self._active[run_id]
        return run

    async def report_failures(self, run_id: str, failures: Sequence[GroupFailure]) -> None:
        """Take in groups that brought no samples."""
        active = self._active.get(run_id)
        if active is not None:
            await active.loop.report_failures(failures)

    def worker_exited(self, exit_: WorkerExit) -> None:
        """A worker ended by itself; its run cannot go on."""
        active = self._active.get(exit_.run_id)
        if active is None:
            return
        how = f"signal {-exit_.code}" if exit_.code < 0 else f"exit code {exit_.code}"
        active.lost_message = (
            f"{exit_.worker_id} ended with {how}; its last lines:\n{exit_.last_lines}"
        )
        active.lost.set()

    def worker_pending(self, run_id: str, reason: str, message: str) -> None:
        """A worker cannot start yet; the run shows why."""
        self._record(run_id, "WorkerPending", f"{reason}: {message}", {"reason": reason})

    def events(
        self, run_id: str, *, after_seq: int, limit: int, type_: str | None = None
    ) -> list[Event]:
        """Events of a run, in order."""
        self._store.get(run_id)
        return self._store.events(run_id, after_seq=after_seq, limit=limit, type_=type_)

    async def watch(self, run_id: str, after_seq: int) -> AsyncIterator[Event]:
        """Events of a run as they come; ends behind the one that ends the run."""
        while True:
            run = self._store.get(run_id)
            events = self._store.events(run_id, after_seq=after_seq, limit=_PAGE)
            for event in events:
                yield event
                after_seq = event.seq
            if events:
                continue
            if run.is_terminal:
                return
            async with self._changed:
                if not self._store.events(run_id, after_seq=after_seq, limit=1):
                    await self._changed.wait()

    async def close(self) -> None:
        """Cancel all active runs and wait until their workers are gone."""
        tasks = [active.task for active in self._active.values() if active.task is not None]
        for run_id in list(self._active):
            try:
                await self.cancel(run_id)
            except FailedPreconditionError:
                continue
        await asyncio.gather(*tasks, return_exceptions=True)

    def fail_interrupted(self) -> None:
        """End runs that an earlier controller process left unfinished."""
        before: str | None = None
        while page := self._store.list_runs(limit=_PAGE, before=before):
            for run in page:
                if not run.is_terminal:
                    event = RunEvent.STOPPED if run.state is RunState.CANCELLING else RunEvent.FAIL
                    self._store.apply(
                        run.run_id,
                        event,
                        reason="ControllerRestarted",
                        message="the controller was restarted while the run was active; submit it again",
                    )
            before = page[-1].run_id

    async def _drive(self, run_id: str, spec: RunSpec, active: _Active) -> None:
        event, reason, message = RunEvent.FAIL, "InternalError", ""
        try:
            self._apply(run_id, RunEvent.ADMIT, "Admitted")
            self._membership.open_run(run_id)
            await self.launcher.start(run_id, spec)
            await self._supervise(run_id, active)
            event, reason = RunEvent.FINISH, "Completed"
        except asyncio.CancelledError:
            event, reason = RunEvent.STOPPED, "CancelledByUser"
        except Exception as error:
            reason, message = await self._explain(_leaves(error), active)
            logger.exception("run failed", extra={"run": run_id, "reason": reason})
        finally:
            await self._end(run_id)
            self._active.pop(run_id, None)
            self._apply(run_id, event, reason, message)
            await self._notify()

    async def _supervise(self, run_id: str, active: _Active) -> None:
        """Run the loop until it ends or a worker is lost."""
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch_workers(run_id, active))
            await active.loop.run(
                on_ready=lambda: self._apply(run_id, RunEvent.READY, "WorkersReady")
            )
            watch.cancel()

    async def _watch_workers(self, run_id: str, active: _Active) -> None:
        """Raise when a worker exits or falls silent."""
        while True:
            try:
                async with asyncio.timeout(self._heartbeat_timeout_s / 2):
                    await active.lost.wait()
                raise WorkerLostError(active.lost_message)
            except TimeoutError:
                silent = [worker.worker_id for worker in self._membership.silent(run_id)]
            if silent:
                raise WorkerLostError(
                    f"{', '.join(silent)} sent no heartbeat for {self._heartbeat_timeout_s:.0f} s"
                )

    async def _explain(self, errors: Sequence[BaseException], active: _Active) -> tuple[str, str]:
        """Stable code and message of a failed run."""
        for error in errors:
            if isinstance(error, WorkerLostError):
                return "WorkerLost", str(error)
        if any(isinstance(error, (UnavailableError, DeadlineExceededError)) for error in errors):
            try:
                async with asyncio.timeout(_EXIT_REPORT_S):
                    await active.lost.wait()
                return "WorkerLost", active.lost_message
            except TimeoutError:
                logger.info("no worker exit explains the failure")
        error = errors[0]
        reason = error.reason if isinstance(error, ServiceError) else type(error).__name__
        return reason, "; ".join(dict.fromkeys(str(error) for error in errors))

    async def _end(self, run_id: str) -> None:
        await self._membership.close_run(run_id)
        await self.launcher.stop(run_id)

    def _apply(self, run_id: str, event: RunEvent, reason: str, message: str = "") -> None:
        self._store.apply(run_id, event, reason=reason, message=message)
        self._tasks.create_task(self._notify())

    def _record(self, run_id: str, *args: object, **kwargs: object) -> None:
        self._store.record(run_id, *args, **kwargs)  # type: ignore[arg-type]
        self._tasks.create_task(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _leaves(error: BaseException) -> list[BaseException]:
    """The errors inside nested groups, or the error itself."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
