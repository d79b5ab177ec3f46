"""Admission of queued runs: starts runs that fit into quotas and fails those that waited too long.

All decisions are one transaction, so a project's limits hold at every moment.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass, field

import sqlalchemy as sa

from services.controller.manager.quotas import QuotaShortage, read_quota
from services.controller.rules.run_state import RunEvent, RunState
from services.controller.settings import Limits
from services.controller.store.records import Event, Note, Run
from services.controller.store.rows import get_run, record_note
from services.controller.store.runs import RunStore
from services.controller.store.tables import RUNS

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
        store: Store of the runs.
        defaults: Limits of projects without their own quota.
        busy: Ids of runs that cannot start yet because they have not fully stopped.
        now: Seconds since the epoch; None means the current time.
    """
    now = time.time() if now is None else now
    with store.database.write() as connection:
        queue = _Queue(connection, store, defaults)
        for run_id, project, deadline in connection.execute(_QUEUED).all():
            if run_id in busy:
                continue
            shortage = queue.start(run_id, project)
            if shortage is not None and deadline is not None and deadline <= now:
                queue.expire(run_id, shortage)
            elif shortage is not None:
                queue.keep(run_id, project, shortage, deadline)
        return queue.result


class _Queue:
    """Processes the queued runs one by one."""

    def __init__(self, connection: sa.Connection, store: RunStore, defaults: Limits) -> None:
        self._connection = connection
        self._store = store
        self._defaults = defaults
        self._waiting: set[str] = set()
        self.result = Admitted()

    def start(self, run_id: str, project: str) -> QuotaShortage | None:
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

    def expire(self, run_id: str, shortage: QuotaShortage) -> None:
        """Fails a run that exceeded its queue time-out."""
        run = get_run(self._connection, run_id, lock=True)
        message = f"the run did not start within limits.queue_timeout_s: {shortage.message}"
        _, event = self._store.move(
            self._connection, run_id, RunEvent.FAIL, reason="QueueTimeout", message=message
        )
        self.result.expired.append(run)
        self.result.events.append((event, run.project))

    def keep(
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
