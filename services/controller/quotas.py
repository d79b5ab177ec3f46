"""What a project may use, and what its runs use."""

import json
from dataclasses import dataclass, replace
from functools import lru_cache

import sqlalchemy as sa

from services.common.errors import FailedPreconditionError, ResourceExhaustedError
from services.common.spec.loader import parse_spec
from services.controller.launch.launcher import num_gpus, worker_names
from services.controller.run.run_state import RunState
from services.controller.store.database import Database
from services.controller.store.records import Run
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


class QuotaTooSmallError(FailedPreconditionError):
    """The run alone needs more than its project may use."""

    reason = "QUOTA_TOO_SMALL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a project may use."""

    max_active_runs: int
    max_queued_runs: int
    max_gpus: int = 0
    """GPUs of its active runs, 0 for no bound; a worker on a host without GPUs counts as if it had them."""
    max_transferqueue_bytes: int = 0
    """Sum of ``transferqueue.quota_bytes`` of its active runs, 0 for no bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run takes while it is active."""

    gpus: int
    transferqueue_bytes: int


@dataclass(frozen=True, slots=True)
class Lack:
    """What a run waits for."""

    reason: str
    """Stable code."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits of a project, and what it uses."""

    project: str
    limits: Limits
    active_runs: int
    queued_runs: int
    gpus: int
    transferqueue_bytes: int

    def lacks(self, needs: Needs) -> Lack | None:
        """What a further run would have to wait for; None if there is room for it."""
        limits = self.limits
        if self.active_runs >= limits.max_active_runs:
            return Lack(
                "ActiveRunsQuota",
                f"project {self.project!r} has {self.active_runs} active runs, and may have "
                f"{limits.max_active_runs}",
            )
        for code, what, needed, used, limit in (
            ("GpuQuota", "GPUs", needs.gpus, self.gpus, limits.max_gpus),
            (
                "TransferQueueQuota",
                "bytes in the transferqueue",
                needs.transferqueue_bytes,
                self.transferqueue_bytes,
                limits.max_transferqueue_bytes,
            ),
        ):
            if limit and used + needed > limit:
                return Lack(
                    code,
                    f"the run needs {needed} {what}, but project {self.project!r} uses {used} of the "
                    f"{limit} that it may",
                )
        return None


@lru_cache(maxsize=4096)
def needs_of(spec_json: str) -> Needs:
    """What a run of a specification takes."""
    spec = parse_spec(json.loads(spec_json))
    return Needs(
        gpus=sum(num_gpus(role, spec) for role, _ in worker_names(spec)),
        transferqueue_bytes=spec.transferqueue.quota_bytes,
    )


def read_quota(connection: sa.Connection, project: str, defaults: Limits) -> Quota:
    """Limits and use of a project."""
    query = (
        sa.select(RUNS.c.state, sa.func.count())
        .where(RUNS.c.project == project)
        .group_by(RUNS.c.state)
    )
    counts = {state: int(count) for state, count in connection.execute(query)}
    active = sa.select(RUNS.c.spec_json).where(RUNS.c.project == project, RUNS.c.state.in_(_ACTIVE))
    needs = [needs_of(spec_json) for spec_json in connection.scalars(active)]
    return Quota(
        project=project,
        limits=_limits(connection, project, defaults),
        active_runs=len(needs),
        queued_runs=counts.get(RunState.QUEUED.value, 0),
        gpus=sum(need.gpus for need in needs),
        transferqueue_bytes=sum(need.transferqueue_bytes for need in needs),
    )


def quota_of(database: Database, project: str, defaults: Limits) -> Quota:
    """Limits and use of a project, in a transaction of its own."""
    with database.read() as connection:
        return read_quota(connection, project, defaults)


def check_submit(connection: sa.Connection, project: str, spec_json: str, defaults: Limits) -> None:
    """See that a project may submit a run.

    Raises:
        QuotaExceededError: If as many wait as may.
        QuotaTooSmallError: If the run could never start.
    """
    quota = read_quota(connection, project, defaults)
    if quota.queued_runs >= quota.limits.max_queued_runs:
        raise QuotaExceededError(
            f"project {project!r} has {quota.queued_runs} queued runs, and may have "
            f"{quota.limits.max_queued_runs}; cancel one, or submit again when one has started",
            retry_after_s=30.0,
            project=project,
        )
    _check_possible(quota, needs_of(spec_json))


def check_change(connection: sa.Connection, run: Run, spec_json: str, defaults: Limits) -> None:
    """See that a run may be changed to another specification.

    Raises:
        QuotaTooSmallError: If the run could never start then.
        QuotaExceededError: If it is active and would need more than is left.
    """
    old, new = needs_of(run.spec_json), needs_of(spec_json)
    if new.gpus <= old.gpus:
        return
    quota = read_quota(connection, run.project, defaults)
    _check_possible(quota, new)
    if run.state.value in _ACTIVE:
        others = replace(
            quota,
            active_runs=quota.active_runs - 1,
            gpus=quota.gpus - old.gpus,
            transferqueue_bytes=quota.transferqueue_bytes - old.transferqueue_bytes,
        )
        if (lack := others.lacks(new)) is not None:
            raise QuotaExceededError(lack.message, retry_after_s=30.0, project=run.project)


def _check_possible(quota: Quota, needs: Needs) -> None:
    """See that a run could start if no other were active."""
    alone = replace(quota, active_runs=0, gpus=0, transferqueue_bytes=0)
    if (lack := alone.lacks(needs)) is not None:
        raise QuotaTooSmallError(f"{lack.message}; make the run smaller, or have the quota raised")


def _limits(connection: sa.Connection, project: str, defaults: Limits) -> Limits:
    row = connection.execute(sa.select(QUOTAS).where(QUOTAS.c.project == project)).first()
    if row is None:
        return defaults
    return Limits(
        max_active_runs=row.max_active_runs,
        max_queued_runs=row.max_queued_runs,
        max_gpus=row.max_gpus,
        max_transferqueue_bytes=row.max_transferqueue_bytes,
    )
