"""The queue: which runs start, what the next one waits for, and which have waited for too long.

One transaction decides all of it, so the limits of a project hold at every moment.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass, field

import sqlalchemy as sa

from services.controller.manager.quotas import QuotaShortage, read_quota
from services.controller.rules.run_state import RunEvent, RunState
from services.controller.settings import Limits
from services.controller.store.records import Event, Note, Run
from services.controller.store.rows import get_run, tell
from services.controller.store.runs import RunStore
from services.controller.store.tables import RUNS

_QUEUED = (
    sa.select(RUNS.c.run_id, RUNS.c.project, RUNS.c.queue_deadline)
    .where(RUNS.c.state == RunState.QUEUED.value)
    .order_by(RUNS.c.priority.desc(), RUNS.c.run_id)
)
_BEHIND = QuotaShortage("Behind", "another run of the project comes before it")


@dataclass(slots=True)
class Admitted:
    """What became of the queue."""

    started: list[Run] = field(default_factory=list)
    """Runs that have their turn; they are STARTING."""
    expired: list[Run] = field(default_factory=list)
    """Runs that waited for too long, as they were; they are FAILED."""
    told: list[tuple[Event, str]] = field(default_factory=list)
    """Events, each with its project."""
    next_deadline: float | None = None
    """When the next run will have waited for too long, in seconds since the epoch."""


def admit(
    store: RunStore, defaults: Limits, *, busy: Collection[str] = (), now: float | None = None
) -> Admitted:
    """Let queued runs start: in each project by priority, then by age, and none before one that has to wait.

    Args:
        store: The runs.
        defaults: Limits of projects without their own.
        busy: Runs that cannot start yet because they have not wholly stopped.
        now: Seconds since the epoch.
    """
    now = time.time() if now is None else now
    with store.database.write() as connection:
        queue = _Queue(connection, store, defaults)
        for run_id, project, deadline in connection.execute(_QUEUED).all():
            if run_id in busy:
                continue
            lack = queue.start(run_id, project)
            if lack is not None and deadline is not None and deadline <= now:
                queue.expire(run_id, lack)
            elif lack is not None:
                queue.keep(run_id, project, lack, deadline)
        return queue.done


class _Queue:
    """Takes the queued runs one by one."""

    def __init__(self, connection: sa.Connection, store: RunStore, defaults: Limits) -> None:
        self._connection = connection
        self._store = store
        self._defaults = defaults
        self._waiting: set[str] = set()
        self.done = Admitted()

    def start(self, run_id: str, project: str) -> QuotaShortage | None:
        """Start a run if there is room for it; returns what it has to wait for."""
        if project in self._waiting:
            return _BEHIND
        run = get_run(self._connection, run_id, lock=True)
        quota = read_quota(self._connection, project, self._defaults)
        if (lack := quota.lacks(run.needs)) is not None:
            return lack
        run, event = self._store.move(self._connection, run_id, RunEvent.ADMIT, reason="Admitted")
        self.done.started.append(run)
        self.done.told.append((event, project))
        return None

    def expire(self, run_id: str, lack: QuotaShortage) -> None:
        """End a run that has waited for too long."""
        run = get_run(self._connection, run_id, lock=True)
        message = f"the run did not start within limits.queue_timeout_s: {lack.message}"
        _, event = self._store.move(
            self._connection, run_id, RunEvent.FAIL, reason="QueueTimeout", message=message
        )
        self.done.expired.append(run)
        self.done.told.append((event, run.project))

    def keep(self, run_id: str, project: str, lack: QuotaShortage, deadline: float | None) -> None:
        """Let a run wait, and tell once what the first run of a project waits for."""
        if deadline is not None:
            self.done.next_deadline = min(deadline, self.done.next_deadline or deadline)
        if project in self._waiting:
            return
        self._waiting.add(project)
        run = get_run(self._connection, run_id, lock=True)
        if all(condition.reason != lack.reason for condition in run.conditions):
            note = Note("Waiting", lack.message, {"reason": lack.reason})
            self.done.told.append((tell(self._connection, run, note), project))
