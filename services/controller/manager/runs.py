"""Life cycle of runs as users command it: create, queue, patch, pause, cancel, delete."""

import asyncio
import json
from collections.abc import Iterable

import sqlalchemy as sa

from services.common.host import steady_time
from services.common.runspec.loader import parse_spec
from services.common.runspec.run import RunSpec
from services.common.security.confinement import CodePolicy
from services.common.task_group import TaskGroup
from services.controller.manager import quotas
from services.controller.manager.archive import CheckpointArchive, check_start
from services.controller.manager.audit import SampleReader
from services.controller.manager.changes import (
    columns_of,
    fork_name,
    fork_of,
    new_run,
    patched_spec,
)
from services.controller.manager.drivers import Drivers
from services.controller.manager.event_feed import EventFeed
from services.controller.manager.quotas import Quota, admit
from services.controller.manager.spec_policy import SpecPolicy
from services.controller.membership import Membership, Worker
from services.controller.rules.run_state import RunEvent, RunState
from services.controller.run.connections import delete_sample_records
from services.controller.run.state.requests import resource_needs
from services.controller.schemas import CancelOptions, ForkRequest, PauseOptions, Role, RunPatch
from services.controller.settings import Limits
from services.controller.store.database import Database
from services.controller.store.records import (
    Event,
    NewRun,
    Note,
    RequestKey,
    Run,
    RunFilter,
    Submission,
)
from services.controller.store.rows import NameTakenError
from services.controller.store.runs import RunStore, Work
from services.wire.transferqueue.client import TransferQueueClient


class RunManager:
    """Creates, queues, changes and ends runs.

    Args:
        defaults: Limits of projects without their own quota.
        allowance: Code and paths that specifications may name.
    """

    def __init__(
        self,
        *,
        database: Database,
        membership: Membership,
        queue: TransferQueueClient,
        tasks: TaskGroup,
        defaults: Limits,
        allowance: CodePolicy,
    ) -> None:
        self._database = database
        self._store = RunStore(database)
        self._membership = membership
        self._queue = queue
        self._tasks = tasks
        self._defaults = defaults
        self._admission = asyncio.Lock()
        self._is_driving = False
        self._alarm: asyncio.TimerHandle | None = None
        self.feed = EventFeed(database, self._store)
        """Events of all runs."""
        self.checkpoints = CheckpointArchive(database, self._checkpoint_deleted)
        """Checkpoints of all runs."""
        self._policy = SpecPolicy(
            allowance, self.get, self.checkpoints.runs_saved_at, self._launcher_problems
        )
        self.samples = SampleReader(queue)
        """Recorded samples of all runs, for people to read."""
        self.drivers = Drivers(
            self._store, tasks, apply=self._apply, on_event=self._publish, on_end=self._admit
        )
        """Drivers of the active runs."""

    async def recover(self) -> None:
        """Lets the workers of runs that an earlier controller drove register again."""
        for run in await self._database.run(self._store.unfinished):
            if run.state not in (RunState.QUEUED, RunState.PAUSED):
                self._membership.open_run(run.run_id)

    async def start(self) -> None:
        """Continues the runs and deletions that an earlier controller began, and admits queued runs."""
        self._is_driving = True
        for run in await self._database.run(self._store.unfinished):
            if run.state is RunState.QUEUED:
                await self._database.run(self._store.limit_wait, run)
            elif run.state is not RunState.PAUSED:
                self.drivers.drive(run)
        self._tasks.create_task(self.checkpoints.finish_deletions())
        await self._admit()

    async def validate(self, project: str, spec: RunSpec, *, role: Role = "operator") -> None:
        """Checks a specification as :meth:`create` does, and stores nothing.

        Raises:
            SpecError: If this installation does not allow it.
            NotFoundError: If it names files of another project's run.
            PermissionDeniedError: If it needs an admin.
            QuotaTooSmallError: If the run alone needs more than its project may use.
        """
        await self._policy.check_for(project, spec, role)
        await self._database.query(
            quotas.check_possible, self._database, project, resource_needs(spec), self._defaults
        )

    async def create(self, submission: Submission, *, role: Role = "operator") -> tuple[Run, bool]:
        """Stores a run, which starts when the queue admits it.

        Returns:
            The run, and True if it is new: a repeated request returns the run of the first one.

        Raises:
            QuotaExceededError: If the project has too many queued runs.
            QuotaTooSmallError: If the run alone needs more than its project may use.
            SpecError: If this installation does not allow it.
            NoCheckpointError: If its ``trainer.checkpoint.start_from`` is being replaced.
        """
        new = new_run(
            submission.spec,
            after=await self._database.run(self._store.newest_id),
            project=submission.project,
            priority=submission.priority,
            labels=dict(submission.labels or {}),
            created_by=submission.actor,
        )
        return await self._create(
            new,
            submission.request,
            role=role,
            also=lambda connection: check_start(connection, submission.spec),
        )

    async def fork(
        self,
        parent: Run,
        fork: ForkRequest,
        *,
        actor: str = "",
        role: Role = "operator",
        request: RequestKey | None = None,
    ) -> Run:
        """Stores a run that continues from a checkpoint of another run.

        Raises:
            NoCheckpointError: If no usable checkpoint exists.
            SpecError: If the overrides break a rule.
            NameTakenError: If an active run of the project has the name that the request gives.
            QuotaExceededError: If the project has too many queued runs.
        """
        checkpoint = await self.checkpoints.usable(parent.run_id, fork.checkpoint_id)
        # Users write specifications, and a large one takes long to parse; a thread keeps the event
        # loop free.
        has_name = bool(fork.name or "name" in fork.overrides)
        while True:
            if not has_name:
                names_in_use = await self._database.query(self._store.active_names, parent.project)
                fork = fork.model_copy(update={"name": fork_name(parent.name, names_in_use)})
            newest = await self._database.run(self._store.newest_id)
            new, write = await asyncio.to_thread(
                fork_of, parent, checkpoint, fork, actor=actor, after=newest
            )
            try:
                return (await self._create(new, request, role=role, also=write))[0]
            except NameTakenError:
                if has_name:
                    raise

    async def _create(
        self, new: NewRun, request: RequestKey | None, *, role: Role, also: Work | None = None
    ) -> tuple[Run, bool]:
        spec = await asyncio.to_thread(parse_spec, new.spec_json)
        await self._policy.check_for(new.project, spec, role)
        run, is_new = await self._database.run(
            self._store.create,
            new,
            request=request,
            check=lambda access: quotas.check_submit(
                access, new.project, new.needs, self._defaults
            ),
            also=also,
        )
        if is_new:
            for event in await self.feed.page(run.run_id, after_seq=0, limit=1):
                self._publish(event, run.project)
            await self._admit()
            run = await self.get(run.run_id)
        return run, is_new

    async def get(self, run_id: str) -> Run:
        return await self._database.query(self._store.get, run_id)

    async def list_runs(
        self, *, limit: int, after: str | None = None, only: RunFilter | None = None
    ) -> list[Run]:
        """Lists runs, newest first unless the filter sets another order."""
        return await self._database.page(
            limit, self._store.list_runs, limit=limit, after=after, only=only
        )

    async def quota(self, project: str) -> Quota:
        return await self._database.query(quotas.quota_of, self._database, project, self._defaults)

    async def limits(self, project: str) -> Limits:
        return await self._database.query(quotas.limits_of, self._database, project, self._defaults)

    async def patch(
        self,
        run_id: str,
        patch: RunPatch,
        *,
        revision: int,
        actor: str = "",
        role: Role = "operator",
    ) -> Run:
        """Changes the mutable parts of an existing run.

        Raises:
            StaleRevisionError: If the run's revision is not ``revision``.
            SpecError: If the changed specification breaks a rule.
            EndedError: If the specification of a run that has ended would change.
            QuotaExceededError: If the changed run needs more than its project may use.
        """
        before = await self.get(run_id)
        spec = await asyncio.to_thread(patched_spec, before, patch)
        if spec is not None:
            self._policy.check(spec, role, base=parse_spec(before.spec_json))
        values = columns_of(patch, spec)

        def check(connection: sa.Connection, run: Run) -> None:
            if spec is not None:
                quotas.check_change(connection, run, resource_needs(spec), self._defaults)

        run = await self._database.run(
            self._store.patch,
            run_id,
            revision=revision,
            values=values,
            keys=sorted(patch.model_dump(include=set(RunPatch.model_fields), exclude_none=True)),
            check=check,
            actor=actor,
        )
        if spec is not None and (driver := self.drivers.find(run_id)) is not None:
            await driver.change(spec)
        await self._admit()
        return run

    async def delete(self, run_id: str, *, revision: int, delete_checkpoints: bool = False) -> None:
        if delete_checkpoints:
            # Checkpoints first: once the run is deleted, nothing names files that a killed controller left.
            await self.checkpoints.delete_all(run_id, revision=revision)
        # Not parsed: the specification may be one of another release.
        samples = json.loads((await self.get(run_id)).spec_json).get("samples") or {}
        await self._database.run(self._store.delete, run_id, revision=revision)
        directory = samples.get("directory") or ""
        self._tasks.create_task(self.samples.delete_records(run_id, directory=directory))
        await self._admit()

    async def was_deleted(self, run_id: str) -> bool:
        """Returns True if a user deleted a run that does not exist; False if a database lost it."""
        return await self._database.query(self._store.was_deleted, run_id)

    async def release(self, run_id: str) -> None:
        """Ends the workers of a run that the database lost, and deletes what they needed."""
        launcher = self.drivers.launcher
        if launcher is not None and self.drivers.find(run_id) is None:
            await launcher.stop(run_id)

    async def cancel(
        self, run_id: str, options: CancelOptions | None = None, *, actor: str = ""
    ) -> Run:
        """Cancels a run.

        Cancelling a cancelled run changes nothing; a second call may shorten the grace period.

        Raises:
            InvalidTransitionError: If the run ended in another way.
        """
        options = options or CancelOptions()
        # Looked up before the state is read: a driver that disappears afterwards has ended the run.
        driver = self.drivers.find(run_id)
        run = await self.get(run_id)
        if run.state is RunState.CANCELLED:
            return run
        before = run
        if run.state is not RunState.CANCELLING:
            run = await self._apply(run_id, RunEvent.CANCEL, "CancelledByUser", actor=actor)
        if (driver := self.drivers.find(run_id) or driver) is not None:
            await driver.end(grace_s=options.grace_seconds, saves=options.save_checkpoint)
        elif run.state is RunState.CANCELLING:
            self.drivers.drive(run)
        else:
            self._leave_queue(before)
        return run

    async def pause(
        self, run_id: str, options: PauseOptions | None = None, *, actor: str = ""
    ) -> Run:
        """Pauses a run: finishes the current step, saves a checkpoint if requested, and stops the workers."""
        options = options or PauseOptions()
        run = await self._apply(run_id, RunEvent.PAUSE, "PausedByUser", actor=actor)
        if (driver := self.drivers.find(run_id)) is not None:
            await driver.pause(saves=options.checkpoint)
        return run

    async def resume(self, run_id: str, *, actor: str = "") -> Run:
        """Queues a paused run again."""
        await self._apply(run_id, RunEvent.RESUME, "ResumedByUser", actor=actor)
        await self._admit()
        return await self.get(run_id)

    async def add_event(self, run: Run, note: Note) -> Event:
        """Appends an event to a run's record, in any state of the run."""
        event = await self._database.run(self._store.record, run.run_id, note)
        self._publish(event, run.project)
        return event

    async def is_ended(self, run_id: str) -> bool:
        return (await self.get(run_id)).is_terminal

    def workers(self, run_id: str) -> list[Worker]:
        """Returns the registered workers of a run, ordered by name."""
        return self._membership.workers(run_id)

    async def close(self, *, leave: bool) -> None:
        """Stops driving runs.

        Args:
            leave: If True, runs continue without a controller until the next one starts. Otherwise
                they are paused where they are, and their workers have stopped when this method returns.
        """
        self._is_driving = False
        # Once this holds the lock, a concurrent admission has started its drivers, which stop with the
        # other ones.
        async with self._admission:
            self._wake_at(None)
            if leave:
                self.drivers.detach()
            else:
                self.drivers.suspend()
        await self.drivers.wait()

    def _launcher_problems(self, spec: RunSpec) -> Iterable[str]:
        launcher = self.drivers.launcher
        return () if launcher is None else launcher.problems(spec)

    async def _admit(self) -> None:
        """Starts queued runs that fit into their projects' quotas."""
        async with self._admission:
            if not self._is_driving:
                return
            admission = await self._database.run(
                admit, self._store, self._defaults, busy=self.drivers.driven_runs()
            )
            for event, project in admission.events:
                self._publish(event, project)
            for run in admission.started:
                self.drivers.drive(run)
            for run in admission.expired:
                self._leave_queue(run)
            self._wake_at(admission.next_deadline)

    def _wake_at(self, deadline: float | None) -> None:
        """Schedules the next admission for the moment at which a queued run exceeds its queue time-out."""
        if self._alarm is not None:
            self._alarm.cancel()
        if deadline is not None:
            self._alarm = asyncio.get_running_loop().call_later(
                max(deadline - steady_time(), 0.0),
                lambda: self._tasks.create_task(self._admit()),
            )

    def _leave_queue(self, run: Run) -> None:
        """Deletes the sample records that a run, which has ended in the queue, stored before its pause."""
        if run.state_reason != "Submitted":
            self._tasks.create_task(delete_sample_records(self._queue, run.run_id))

    async def _apply(
        self, run_id: str, event: RunEvent, reason: str, message: str = "", *, actor: str = ""
    ) -> Run:
        run, recorded = await self._database.run(
            self._store.apply, run_id, event, reason=reason, message=message, actor=actor
        )
        self._publish(recorded, run.project)
        return run

    def _checkpoint_deleted(self, event: Event, project: str) -> None:
        self._publish(event, project)
        self._tasks.create_task(self._admit())

    def _publish(self, event: Event, project: str) -> None:
        self.feed.publish(event, project=project)
