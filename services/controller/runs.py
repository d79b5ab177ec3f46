"""Runs and their life: created, queued, driven each by a driver, ended, always with a stated reason."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from services.common.clock import Clock
from services.common.errors import UnavailableError
from services.common.ids import new_run_id
from services.common.spec.loader import canonical_json, parse_spec, spec_digest
from services.controller import quotas
from services.controller.api.event_feed import EventFeed
from services.controller.api.models import CancelOptions, ForkRequest, RunPatch
from services.controller.archive import CheckpointArchive
from services.controller.client import GroupFailure
from services.controller.forks import fork_of
from services.controller.launch.launcher import Launcher, WorkerExit
from services.controller.membership import Membership, Worker
from services.controller.patches import columns_of, patched_spec
from services.controller.quotas import Quota, QuotaDefaults
from services.controller.run.driver import RunDriver, Services
from services.controller.run.journal import Journal
from services.controller.run.run_state import RunEvent, RunState
from services.controller.spec_policy import SpecPolicy
from services.controller.store.database import Database
from services.controller.store.records import (
    NewRun,
    Note,
    RequestKey,
    Run,
    RunFilter,
    Submission,
)
from services.controller.store.runs import InvalidTransitionError, RunStore, Work
from services.transferqueue.client import TransferQueueClient

logger = logging.getLogger(__name__)


class RunManager:
    """Creates, queues, drives and ends runs.

    Args:
        database: Durable state.
        membership: Where workers register.
        queue: The transferqueue.
        clock: For stalls.
        tasks: Owns the drivers of the runs.
        heartbeat_timeout_s: A worker silent for longer counts as lost.
        defaults: Quota of projects without their own.
        allowed_roots: Folders that specifications may name files in; none allows all.
    """

    def __init__(
        self,
        *,
        database: Database,
        membership: Membership,
        queue: TransferQueueClient,
        clock: Clock,
        tasks: asyncio.TaskGroup,
        heartbeat_timeout_s: float,
        defaults: QuotaDefaults,
        allowed_roots: Sequence[Path] = (),
    ) -> None:
        self._database = database
        self._store = RunStore(database)
        self._membership = membership
        self._queue = queue
        self._clock = clock
        self._tasks = tasks
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._defaults = defaults
        self.policy = SpecPolicy(allowed_roots, self.get)
        """What specifications may name."""
        self._drivers: dict[str, RunDriver] = {}
        self._admission = asyncio.Lock()
        self._is_closing = False
        self.feed = EventFeed(database, self._store)
        """Events of all runs."""
        self.checkpoints = CheckpointArchive(
            database, lambda event, project: self.feed.publish(event, project=project)
        )
        """Checkpoints of all runs."""
        self.launcher: Launcher

    async def recover(self) -> None:
        """Expect the workers of runs that an earlier controller process drove."""
        for run in await self._database.run(self._store.unfinished):
            if run.state not in (RunState.QUEUED, RunState.PAUSED):
                self._membership.open_run(run.run_id)

    async def start(self) -> None:
        """Drive what an earlier controller process drove, and what is queued."""
        for run in await self._database.run(self._store.unfinished):
            if run.state not in (RunState.QUEUED, RunState.PAUSED):
                self._drive(run)
        await self._admit()

    async def create(self, submission: Submission) -> tuple[Run, bool]:
        """Store a run; it starts when its turn comes.

        Returns:
            The run, and whether it is new: a request seen before returns its run.

        Raises:
            QuotaExceededError: If the project has too many queued runs.
            SpecError: If this installation does not allow it.
        """
        spec = submission.spec
        new = NewRun(
            run_id=new_run_id(),
            name=spec.name,
            spec_json=canonical_json(spec),
            spec_digest=spec_digest(spec),
            project=submission.project,
            priority=submission.priority,
            labels=dict(submission.labels or {}),
            created_by=submission.actor,
        )
        return await self._create(new, submission.request)

    async def fork(
        self, parent: Run, fork: ForkRequest, *, actor: str = "", request: RequestKey | None = None
    ) -> Run:
        """Store a run that goes on from a checkpoint of another one.

        Raises:
            NoCheckpointError: If there is none to go on from.
            SpecError: If the overrides break a rule.
            QuotaExceededError: If the project has too many queued runs.
        """
        checkpoint = await self.checkpoints.usable(parent.run_id, fork.checkpoint_id)
        new, write = fork_of(parent, checkpoint, fork, actor=actor)
        return (await self._create(new, request, also=write))[0]

    async def _create(
        self, new: NewRun, request: RequestKey | None, *, also: Work | None = None
    ) -> tuple[Run, bool]:
        await self.policy.check_for(new.project, parse_spec(new.spec_json))
        run, is_new = await self._database.run(
            self._store.create,
            new,
            request=request,
            check=lambda found: quotas.check_room(found, new.project, self._defaults),
            also=also,
        )
        if is_new:
            for event in await self.feed.page(run.run_id, after_seq=0, limit=1):
                self.feed.publish(event, project=run.project)
            await self._admit()
            run = await self.get(run.run_id)
        return run, is_new

    async def get(self, run_id: str) -> Run:
        """One run."""
        return await self._database.run(self._store.get, run_id)

    async def list_runs(
        self, *, limit: int, after: str | None = None, only: RunFilter | None = None
    ) -> list[Run]:
        """Runs, newest first unless the filter says otherwise."""
        return await self._database.run(self._store.list_runs, limit=limit, after=after, only=only)

    async def quota(self, project: str) -> Quota:
        """Limits and use of a project."""
        return await self._database.run(quotas.quota_of, self._database, project, self._defaults)

    async def patch(self, run_id: str, patch: RunPatch, *, revision: int, actor: str = "") -> Run:
        """Change what may change in a run that exists.

        Raises:
            StaleRevisionError: If the run's revision is not ``revision``.
            SpecError: If the specification would break a rule.
        """
        spec = patched_spec(await self.get(run_id), patch)
        run = await self._database.run(
            self._store.patch,
            run_id,
            revision=revision,
            values=columns_of(patch, spec),
            actor=actor,
        )
        if spec is not None and (driver := self._drivers.get(run_id)) is not None:
            driver.change(spec)
        await self._admit()
        return run

    async def delete(self, run_id: str, *, revision: int, delete_checkpoints: bool = False) -> None:
        """Forget a run that has ended."""
        saved = await self.checkpoints.files_of(run_id) if delete_checkpoints else ()
        await self._database.run(self._store.delete, run_id, revision=revision)
        await self.checkpoints.remove(saved)

    async def cancel(
        self, run_id: str, options: CancelOptions | None = None, *, actor: str = ""
    ) -> Run:
        """End a run. Cancelling a cancelled run changes nothing; a second call may shorten the grace.

        Raises:
            InvalidTransitionError: If it ended in another way.
        """
        options = options or CancelOptions()
        run = await self.get(run_id)
        if run.state is RunState.CANCELLED:
            return run
        if run.state is not RunState.CANCELLING:
            run = await self._apply(run_id, RunEvent.CANCEL, "CancelledByUser", actor=actor)
        driver = self._drivers.get(run_id)
        if driver is not None:
            driver.end(grace_s=options.grace_seconds, saves=options.save_checkpoint)
        elif run.state is RunState.CANCELLING:
            self._drive(run)
        return run

    async def pause(self, run_id: str, *, actor: str = "") -> Run:
        """Finish the current step, save a checkpoint and stop the workers."""
        run = await self._apply(run_id, RunEvent.PAUSE, "PausedByUser", actor=actor)
        if (driver := self._drivers.get(run_id)) is not None:
            driver.pause()
        return run

    async def resume(self, run_id: str, *, actor: str = "") -> Run:
        """Queue a paused run again."""
        await self._apply(run_id, RunEvent.RESUME, "ResumedByUser", actor=actor)
        await self._admit()
        return await self.get(run_id)

    def running(self, run: Run) -> RunDriver:
        """The driver of a run that trains.

        Raises:
            InvalidTransitionError: If it does not train now.
        """
        driver = self._drivers.get(run.run_id)
        if driver is None or run.state is not RunState.RUNNING:
            raise InvalidTransitionError(
                f"run {run.run_id} is {run.state}; this needs a RUNNING one", run_id=run.run_id
            )
        return driver

    def activities(self, run_id: str) -> list[str]:
        """What a run is doing now."""
        driver = self._drivers.get(run_id)
        return driver.activities() if driver is not None else []

    async def is_ended(self, run_id: str) -> bool:
        """Whether a run has ended."""
        return (await self.get(run_id)).is_terminal

    def workers(self, run_id: str) -> list[Worker]:
        """Registered workers of a run, by name."""
        return self._membership.workers(run_id)

    async def report_failures(self, run_id: str, failures: Sequence[GroupFailure]) -> None:
        """Take in groups that brought no samples."""
        driver = self._drivers.get(run_id)
        if driver is not None:
            await driver.report_failures(failures)
        elif not (await self.get(run_id)).is_terminal:
            raise UnavailableError("the run is being restored; report again")

    def worker_exited(self, exit_: WorkerExit) -> None:
        """A worker ended by itself."""
        if (driver := self._drivers.get(exit_.run_id)) is not None:
            driver.worker_exited(exit_)

    def worker_replaced(self, run_id: str, worker_id: str) -> None:
        """Another process registered in a worker's place."""
        if (driver := self._drivers.get(run_id)) is not None:
            driver.worker_lost(worker_id, f"{worker_id} was started again", is_replaced=True)

    def worker_pending(self, run_id: str, reason: str, message: str) -> None:
        """A worker cannot start yet; the run shows why."""
        note = Note("WorkerPending", f"{reason}: {message}", {"reason": reason})
        if (driver := self._drivers.get(run_id)) is not None:
            self._tasks.create_task(driver.note(note))

    async def close(self, *, leave: bool) -> None:
        """Stop driving.

        Args:
            leave: Whether runs go on without a controller until the next one comes; otherwise they are
                cancelled, and their workers are gone when this returns.
        """
        self._is_closing = True
        tasks = [driver.task for driver in self._drivers.values() if driver.task is not None]
        for run_id, driver in list(self._drivers.items()):
            if leave:
                driver.leave()
                continue
            try:
                await self.cancel(run_id)
            except InvalidTransitionError:
                continue
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _admit(self) -> None:
        """Start queued runs that may start."""
        if self._is_closing:
            return

        async with self._admission:
            startable = await self._database.run(quotas.startable, self._database, self._defaults)
            for run in startable:
                if run.run_id not in self._drivers:
                    await self._apply(run.run_id, RunEvent.ADMIT, "Admitted")
                    self._drive(await self.get(run.run_id))

    def _drive(self, run: Run) -> None:
        driver = self._drivers[run.run_id] = RunDriver(
            run.run_id,
            parse_spec(run.spec_json),
            Services(
                membership=self._membership,
                launcher=self.launcher,
                queue=self._queue,
                clock=self._clock,
                heartbeat_timeout_s=self._heartbeat_timeout_s,
            ),
            journal=self._journal(run.run_id, run.project),
            state=run.state,
            move=lambda event, reason, message: self._move(run.run_id, event, reason, message),
        )
        driver.task = self._tasks.create_task(self._drive_to_end(run.run_id, driver))

    async def _drive_to_end(self, run_id: str, driver: RunDriver) -> None:
        try:
            await driver.drive()
        finally:
            self._drivers.pop(run_id, None)
        await self._admit()

    def _journal(self, run_id: str, project: str) -> Journal:
        return Journal(
            run_id,
            database=self._database,
            store=self._store,
            on_event=lambda event: self.feed.publish(event, project=project),
        )

    async def _move(self, run_id: str, event: RunEvent, reason: str, message: str) -> RunState:
        return (await self._apply(run_id, event, reason, message)).state

    async def _apply(
        self, run_id: str, event: RunEvent, reason: str, message: str = "", *, actor: str = ""
    ) -> Run:
        run, told = await self._database.run(
            self._store.apply, run_id, event, reason=reason, message=message, actor=actor
        )
        self.feed.publish(told, project=run.project)
        return run
