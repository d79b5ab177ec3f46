"""What a project may use: active and queued runs."""

from dataclasses import dataclass

import sqlalchemy as sa

from services.common.errors import ResourceExhaustedError
from services.controller.run.run_state import RunState
from services.controller.store.database import Database
from services.controller.store.records import Run
from services.controller.store.rows import to_run
from services.controller.store.tables import QUOTAS, RUNS

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


class QuotaExceededError(ResourceExhaustedError):
    """The project uses all that it may."""

    reason = "QUOTA_EXCEEDED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits of a project, and what it uses."""

    project: str
    max_active_runs: int
    max_queued_runs: int
    active_runs: int = 0
    queued_runs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaDefaults:
    """Limits of a project that has none of its own."""

    max_active_runs: int
    max_queued_runs: int


def read_quota(connection: sa.Connection, project: str, defaults: QuotaDefaults) -> Quota:
    """Limits and use of a project."""
    row = connection.execute(sa.select(QUOTAS).where(QUOTAS.c.project == project)).first()
    query = (
        sa.select(RUNS.c.state, sa.func.count())
        .where(RUNS.c.project == project)
        .group_by(RUNS.c.state)
    )
    counts = {state: int(count) for state, count in connection.execute(query)}
    return Quota(
        project=project,
        max_active_runs=row.max_active_runs if row else defaults.max_active_runs,
        max_queued_runs=row.max_queued_runs if row else defaults.max_queued_runs,
        active_runs=sum(counts.get(state, 0) for state in _ACTIVE),
        queued_runs=counts.get(RunState.QUEUED.value, 0),
    )


def check_room(connection: sa.Connection, project: str, defaults: QuotaDefaults) -> None:
    """See that a project may submit another run.

    Raises:
        QuotaExceededError: If as many wait as may.
    """
    quota = read_quota(connection, project, defaults)
    if quota.queued_runs >= quota.max_queued_runs:
        raise QuotaExceededError(
            f"project {project!r} has {quota.queued_runs} queued runs, and may have "
            f"{quota.max_queued_runs}; cancel one, or submit again when one has started",
            retry_after_s=30.0,
            project=project,
        )


def quota_of(database: Database, project: str, defaults: QuotaDefaults) -> Quota:
    """Limits and use of a project, in a transaction of its own."""
    with database.read() as connection:
        return read_quota(connection, project, defaults)


def startable(database: Database, defaults: QuotaDefaults) -> list[Run]:
    """Queued runs that may start now: higher priority first, then the older one."""
    with database.read() as connection:
        return _startable(connection, defaults)


def _startable(connection: sa.Connection, defaults: QuotaDefaults) -> list[Run]:
    rows = connection.execute(
        sa.select(RUNS)
        .where(RUNS.c.state == RunState.QUEUED.value)
        .order_by(RUNS.c.priority.desc(), RUNS.c.run_id)
    )
    room: dict[str, int] = {}
    chosen: list[Run] = []
    for run in map(to_run, rows):
        if run.project not in room:
            quota = read_quota(connection, run.project, defaults)
            room[run.project] = quota.max_active_runs - quota.active_runs
        if room[run.project] > 0:
            room[run.project] -= 1
            chosen.append(run)
    return chosen
