"""Limits of projects and the use of their runs."""

from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace

import sqlalchemy as sa

from services.common.errors import FailedPreconditionError, ResourceExhaustedError
from services.common.host import steady_time
from services.controller.rules.run_state import RunEvent, RunState
from services.controller.settings import Limits
from services.controller.store.database import Database
from services.controller.store.records import Event, Needs, Note, Run
from services.controller.store.rows import get_run, record_note
from services.controller.store.runs import RunStore
from services.controller.store.tables import CHECKPOINTS, QUOTAS, RUNS

_ACTIVE = tuple(
    state.value
    for state in (
        RunState.STARTING,
        RunState.RUNNING,
        RunState.PAUSING,
        RunState.RECOVERING,
        RunState.CANCELLING,
    )
)
# Built once, because every request uses them.
_OF_PROJECT = RUNS.c.project == sa.bindparam("project")
_ACTIVE_RUNS = sa.select(
    sa.func.count(),
    sa.func.coalesce(sa.func.sum(RUNS.c.gpus), 0),
    sa.func.coalesce(sa.func.sum(RUNS.c.transferqueue_bytes), 0),
).where(_OF_PROJECT, RUNS.c.state.in_(_ACTIVE))
_NUM_QUEUED = sa.select(sa.func.count()).where(_OF_PROJECT, RUNS.c.state == RunState.QUEUED.value)
_SAVED_BYTES = (
    sa.select(sa.func.coalesce(sa.func.sum(CHECKPOINTS.c.size_bytes), 0))
    .join(RUNS, RUNS.c.run_id == CHECKPOINTS.c.run_id)
    .where(_OF_PROJECT, CHECKPOINTS.c.state == "READY")
)
_LIMITS = sa.select(QUOTAS).where(QUOTAS.c.project == sa.bindparam("project"))


class QuotaExceededError(ResourceExhaustedError):
    """The project uses all that its quota allows."""

    reason = "QUOTA_EXCEEDED"


class QuotaTooSmallError(FailedPreconditionError):
    """The run alone needs more than its project's quota allows."""

    reason = "QUOTA_TOO_SMALL"


@dataclass(frozen=True, slots=True)
class QuotaShortage:
    """Shortage of quota that a run waits for."""

    reason: str
    """Stable code for programs."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits of a project and its current use."""

    project: str
    limits: Limits
    active_runs: int
    queued_runs: int
    gpus: int
    transferqueue_bytes: int
    checkpoint_bytes: int

    def shortage_for(self, needs: Needs) -> QuotaShortage | None:
        """Returns the shortage that one more run would wait for; None if the quota has room for it."""
        limits = self.limits
        if self.active_runs >= limits.max_active_runs:
            return QuotaShortage(
                "ActiveRunsQuota",
                f"project {self.project!r} has {self.active_runs} active runs of at most "
                f"{limits.max_active_runs}",
            )
        for code, resource, demand, usage, limit in (
            ("GpuQuota", "GPUs", needs.gpus, self.gpus, limits.max_gpus),
            (
                "TransferQueueQuota",
                "bytes in the transferqueue",
                needs.transferqueue_bytes,
                self.transferqueue_bytes,
                limits.max_transferqueue_bytes,
            ),
        ):
            if limit and usage + demand > limit:
                return QuotaShortage(
                    code,
                    f"the run needs {demand} {resource}, but project {self.project!r} uses {usage} of its "
                    f"{limit}",
                )
        if 0 < limits.max_checkpoint_bytes <= self.checkpoint_bytes:
            return QuotaShortage(
                "CheckpointQuota",
                f"checkpoints of project {self.project!r} use {self.checkpoint_bytes} of its "
                f"{limits.max_checkpoint_bytes} bytes; delete some",
            )
        return None


def read_quota(connection: sa.Connection, project: str, defaults: Limits) -> Quota:
    parameters = {"project": project}
    active = connection.execute(_ACTIVE_RUNS, parameters).one()
    return Quota(
        project=project,
        limits=read_limits(connection, project, defaults),
        active_runs=active[0],
        queued_runs=connection.execute(_NUM_QUEUED, parameters).scalar_one(),
        gpus=int(active[1]),
        transferqueue_bytes=int(active[2]),
        checkpoint_bytes=int(connection.execute(_SAVED_BYTES, parameters).scalar_one()),
    )


def quota_of(database: Database, project: str, defaults: Limits) -> Quota:
    """Reads the limits and the current use of a project in a separate transaction."""
    with database.read() as connection:
        return read_quota(connection, project, defaults)


def limits_of(database: Database, project: str, defaults: Limits) -> Limits:
    """Reads the limits of a project in a separate transaction."""
    with database.read() as connection:
        return read_limits(connection, project, defaults)


def read_limits(connection: sa.Connection, project: str, defaults: Limits) -> Limits:
    row = connection.execute(_LIMITS, {"project": project}).first()
    if row is None:
        return defaults
    return Limits(**{field.name: getattr(row, field.name) for field in fields(Limits)})


def check_submit(connection: sa.Connection, project: str, needs: Needs, defaults: Limits) -> None:
    """Checks that a project may submit a run.

    Raises:
        QuotaExceededError: If the project has the maximum number of queued runs.
        QuotaTooSmallError: If the run could never start.
    """
    quota = read_quota(connection, project, defaults)
    if quota.queued_runs >= quota.limits.max_queued_runs:
        raise QuotaExceededError(
            f"project {project!r} has {quota.queued_runs} queued runs of at most "
            f"{quota.limits.max_queued_runs}; cancel one, or submit again after one has started",
            retry_after_s=30.0,
            project=project,
        )
    _check_possible(quota, needs)


def check_possible(database: Database, project: str, needs: Needs, defaults: Limits) -> None:
    """Checks that a run of a project could ever start.

    Raises:
        QuotaTooSmallError: If it could not.
    """
    _check_possible(quota_of(database, project, defaults), needs)


def check_change(connection: sa.Connection, run: Run, needs: Needs, defaults: Limits) -> None:
    """Checks that a run's needs may change.

    Raises:
        QuotaTooSmallError: If the changed run could never start.
        QuotaExceededError: If the run is active and needs more than the project has left.
    """
    if needs.gpus <= run.needs.gpus:
        return
    quota = read_quota(connection, run.project, defaults)
    _check_possible(quota, needs)
    if run.state.value in _ACTIVE:
        other_usage = replace(
            quota,
            active_runs=quota.active_runs - 1,
            gpus=quota.gpus - run.needs.gpus,
            transferqueue_bytes=quota.transferqueue_bytes - run.needs.transferqueue_bytes,
            checkpoint_bytes=0,
        )
        if (shortage := other_usage.shortage_for(needs)) is not None:
            raise QuotaExceededError(shortage.message, retry_after_s=30.0, project=run.project)


def _check_possible(quota: Quota, needs: Needs) -> None:
    """Checks that a run could start if no other run were active."""
    alone = replace(quota, active_runs=0, gpus=0, transferqueue_bytes=0, checkpoint_bytes=0)
    if (shortage := alone.shortage_for(needs)) is not None:
        raise QuotaTooSmallError(
            f"{shortage.message}; reduce the run's resources, or ask an admin to raise the quota"
        )


_QUEUED = (
    sa.select(RUNS.c.run_id, RUNS.c.project, RUNS.c.queue_deadline)
    .where(RUNS.c.state == RunState.QUEUED.value)
    .order_by(RUNS.c.priority.desc(), RUNS.c.run_id)
)
_NOT_FIRST = QuotaShortage("Behind", "another run of the project is first in the queue")


@dataclass(slots=True)
class Admitted:
    """Result of one admission."""

    started: list[Run] = field(default_factory=list)
    """Started runs, in state STARTING."""
    expired: list[Run] = field(default_factory=list)
    """Runs that exceeded their queue time-out, as they were before; they are now FAILED."""
    events: list[tuple[Event, str]] = field(default_factory=list)
    """Recorded events, each with its project."""
    next_deadline: float | None = None
    """Next time at which a run exceeds its queue time-out, in seconds since the epoch."""


def admit(
    store: RunStore, defaults: Limits, *, busy: Collection[str] = (), now: float | None = None
) -> Admitted:
    """Starts queued runs: per project by priority, then by age; a run never overtakes one that has to wait.

    Args:
        defaults: Limits of projects without their own quota.
        busy: Ids of runs that cannot start yet because they have not fully stopped.
        now: As of :func:`steady_time`; None means the current time.
    """
    now = steady_time() if now is None else now
    with store.database.write() as connection:
        queue = _Queue(connection, store, defaults)
        for run_id, project, deadline in connection.execute(_QUEUED).all():
            if run_id in busy:
                continue
            shortage = queue.start_run(run_id, project)
            if shortage is not None and deadline is not None and deadline <= now:
                queue.expire_run(run_id, shortage)
            elif shortage is not None:
                queue.leave_queued(run_id, project, shortage, deadline)
        return queue.result


class _Queue:
    """Processes the queued runs one by one."""

    def __init__(self, connection: sa.Connection, store: RunStore, defaults: Limits) -> None:
        self._connection = connection
        self._store = store
        self._defaults = defaults
        self._waiting: set[str] = set()
        self.result = Admitted()

    def start_run(self, run_id: str, project: str) -> QuotaShortage | None:
        """Starts a run if the quota has room for it; otherwise returns the shortage that it waits for."""
        if project in self._waiting:
            return _NOT_FIRST
        run = get_run(self._connection, run_id, lock=True)
        quota = read_quota(self._connection, project, self._defaults)
        if (shortage := quota.shortage_for(run.needs)) is not None:
            return shortage
        run, event = self._store.move(self._connection, run_id, RunEvent.ADMIT, reason="Admitted")
        self.result.started.append(run)
        self.result.events.append((event, project))
        return None

    def expire_run(self, run_id: str, shortage: QuotaShortage) -> None:
        """Fails a run that exceeded its queue time-out."""
        run = get_run(self._connection, run_id, lock=True)
        message = f"the run did not start within limits.queue_timeout_s: {shortage.message}"
        _, event = self._store.move(
            self._connection, run_id, RunEvent.FAIL, reason="QueueTimeout", message=message
        )
        self.result.expired.append(run)
        self.result.events.append((event, run.project))

    def leave_queued(
        self, run_id: str, project: str, shortage: QuotaShortage, deadline: float | None
    ) -> None:
        """Leaves a run in the queue, and records once why the first run of a project waits."""
        if deadline is not None:
            self.result.next_deadline = min(deadline, self.result.next_deadline or deadline)
        if project in self._waiting:
            return
        self._waiting.add(project)
        run = get_run(self._connection, run_id, lock=True)
        if all(condition.reason != shortage.reason for condition in run.conditions):
            note = Note("Waiting", shortage.message, {"reason": shortage.reason})
            self.result.events.append((record_note(self._connection, run, note), project))
