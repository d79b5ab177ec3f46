"""Durable state of runs and their events.

Every change of a run and the event that reports it are one transaction.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from services.common.errors import AbortedError, FailedPreconditionError
from services.controller.rules.run_state import TERMINAL, RunEvent, RunState, next_state
from services.controller.store.database import Database
from services.controller.store.records import (
    ALL_EVENTS,
    Event,
    EventFilter,
    NewRun,
    Note,
    RequestKey,
    Run,
    RunFilter,
)
from services.controller.store.rows import (
    IS_UNFINISHED,
    NEWEST_SEQ,
    CursorExpiredError,
    append_event,
    check_name,
    forget_events,
    forget_requests,
    get_run,
    has_forgotten,
    insert_run,
    queue_deadline,
    read_events,
    record_note,
    remember_request,
    seen_request,
    to_event,
    to_run,
)
from services.controller.store.tables import DELETED_RUNS, EVENTS, IDEMPOTENCY_KEYS, RUNS

Work = Callable[[sa.Connection], None]
"""Additional writes of a transaction."""


class StaleRevisionError(AbortedError):
    """The run was changed since the caller read it."""

    reason = "STALE_REVISION"


class InvalidTransitionError(FailedPreconditionError):
    """The run's state does not allow the event."""

    reason = "INVALID_TRANSITION"


class NotTerminalError(FailedPreconditionError):
    """The run has not ended."""

    reason = "NOT_TERMINAL"


class EndedError(FailedPreconditionError):
    """The run has ended."""

    reason = "ENDED"


class RunStore:
    """Stores runs and events. Methods block; see :meth:`Database.run`.

    Args:
        events_kept: Number of newest events to keep per run; older ones are deleted from time to
            time.
    """

    def __init__(self, database: Database, *, events_kept: int = 100_000) -> None:
        self.database = database
        """Database of the runs."""
        self._events_kept = events_kept

    def create(
        self,
        new: NewRun,
        *,
        request: RequestKey | None = None,
        check: Work | None = None,
        also: Work | None = None,
    ) -> tuple[Run, bool]:
        """Stores a new run in state QUEUED.

        Args:
            request: Identity of the request; None without an idempotency key.
            check: Refuses the run by raising, inside the transaction.
            also: Writes other rows that belong to the run.

        Returns:
            The run, and True if it is new: a repeated request returns the run of the first one.

        Raises:
            IdempotencyKeyReusedError: If the request's key was used with another body.
            NameTakenError: If a run of the project that has not ended has the name.
        """
        with self.database.write() as connection:
            if request is not None:
                earlier_id = seen_request(connection, request)
                if earlier_id is not None:
                    return get_run(connection, earlier_id), False
            check_name(connection, new)
            if check is not None:
                check(connection)
            note = insert_run(connection, new)
            if request is not None:
                remember_request(connection, request, new.run_id)
            if also is not None:
                also(connection)
            append_event(connection, new.run_id, note)
            return get_run(connection, new.run_id), True

    def get(self, run_id: str) -> Run:
        """Returns one run.

        Raises:
            NotFoundError: If no run has that id.
        """
        with self.database.read() as connection:
            return get_run(connection, run_id)

    def list_runs(
        self,
        *,
        limit: int,
        after: str | None = None,
        only: RunFilter | None = None,
        has_specs: bool = False,
    ) -> list[Run]:
        """Lists runs after the run ``after``, newest first unless the filter sets another order."""
        only = only or RunFilter()
        order = RUNS.c.run_id if only.is_oldest_first else RUNS.c.run_id.desc()
        columns = RUNS.c if has_specs else [field for field in RUNS.c if field.name != "spec_json"]
        query = sa.select(*columns).order_by(order).limit(limit)
        if after is not None:
            is_after = RUNS.c.run_id > after if only.is_oldest_first else RUNS.c.run_id < after
            query = query.where(is_after)
        if only.project is not None:
            query = query.where(RUNS.c.project == only.project)
        if only.state is not None:
            query = query.where(RUNS.c.state == only.state.value)
        if only.name is not None:
            query = query.where(RUNS.c.name == only.name)
        if only.label is not None:
            key, value = only.label
            pair = f"{json.dumps(key)}: {json.dumps(value)}"
            query = query.where(RUNS.c.labels_json.contains(pair, autoescape=True))
        with self.database.read() as connection:
            return [to_run(row) for row in connection.execute(query)]

    def unfinished(self) -> list[Run]:
        """Returns the runs that have not ended, oldest first."""
        query = sa.select(RUNS).where(IS_UNFINISHED).order_by(RUNS.c.run_id)
        with self.database.read() as connection:
            return [to_run(row) for row in connection.execute(query)]

    def newest_id(self) -> str:
        """Returns the id of the newest run; empty without runs."""
        with self.database.read() as connection:
            return connection.execute(sa.select(sa.func.max(RUNS.c.run_id))).scalar() or ""

    def limit_wait(self, run: Run) -> None:
        """Lets a queued run wait for at most its time-out, if an earlier controller's clock was ahead."""
        if (latest := queue_deadline(run.spec_json)) is None:
            return
        later = RUNS.update().where(RUNS.c.run_id == run.run_id, RUNS.c.queue_deadline > latest)
        with self.database.write() as connection:
            connection.execute(later.values(queue_deadline=latest))

    def active_names(self, project: str) -> set[str]:
        """Returns the names of a project's runs that have not ended."""
        query = sa.select(RUNS.c.name).where(IS_UNFINISHED, RUNS.c.project == project)
        with self.database.read() as connection:
            return {row.name for row in connection.execute(query)}

    def apply(
        self, run_id: str, event: RunEvent, *, reason: str, message: str = "", actor: str = ""
    ) -> tuple[Run, Event]:
        """Applies an event to a run; returns the run in its new state and the recorded event.

        Raises:
            InvalidTransitionError: If the run's state does not allow the event.
        """
        with self.database.write() as connection:
            return self.move(connection, run_id, event, reason=reason, message=message, actor=actor)

    def move(
        self,
        connection: sa.Connection,
        run_id: str,
        event: RunEvent,
        *,
        reason: str,
        message: str = "",
        actor: str = "",
    ) -> tuple[Run, Event]:
        """Applies an event like :meth:`apply`, in a transaction that the caller opened."""
        run = get_run(connection, run_id, lock=True)
        state = next_state(run.state, event)
        if state is None:
            raise InvalidTransitionError(
                f"cannot {event} run {run_id} in state {run.state}", run_id=run_id, state=run.state
            )
        text = message or f"the run is {state.value}"
        data = {"from": run.state.value, "to": state.value, "reason": reason}
        values: dict[str, Any] = {
            "state": state.value,
            "state_reason": reason,
            "message": message,
        }
        if state is RunState.QUEUED:
            values["queue_deadline"] = queue_deadline(run.spec_json)
        if state is RunState.STARTING and run.start_time is None:
            values["start_time"] = time.time()
        if state in TERMINAL:
            values["finish_time"] = time.time()
            forget_requests(connection, run_id)
        if state is RunState.PAUSED:
            forget_requests(connection, run_id, "pause")
        recorded = record_note(
            connection, run, Note("StateChanged", text, data, actor=actor), **values
        )
        return get_run(connection, run_id), recorded

    def record(self, run_id: str, note: Note, *, also: Work | None = None) -> Event:
        """Appends an event and, in the same transaction, the progress that it reports and further writes."""
        values: dict[str, Any] = {}
        if note.step is not None:
            values["step"] = note.step
        if note.weight_version is not None:
            values["weight_version"] = note.weight_version
        if note.summary is not None:
            values["summary_json"] = json.dumps(note.summary)
        with self.database.write() as connection:
            run = get_run(connection, run_id, lock=True)
            if also is not None:
                also(connection)
            event = record_note(connection, run, note, **values)
            if event.seq % max(self._events_kept // 10, 1) == 0:
                forget_events(connection, run_id, until=event.seq - self._events_kept)
            return event

    def patch(
        self,
        run_id: str,
        *,
        revision: int,
        values: Mapping[str, Any],
        keys: Sequence[str] = (),
        check: Callable[[sa.Connection, Run], None] | None = None,
        actor: str = "",
    ) -> Run:
        """Changes labels, priority or specification of a run.

        Args:
            revision: Revision that the caller has read.
            check: Refuses the change by raising, inside the transaction.

        Raises:
            StaleRevisionError: If the run's revision is not ``revision``.
            EndedError: If the specification of a run that has ended would change.
        """
        with self.database.write() as connection:
            run = get_run(connection, run_id, lock=True)
            _check_revision(run, revision)
            if "spec_json" in values and run.is_terminal:
                raise EndedError(
                    f"run {run_id} is {run.state}, so its specification stays as it was trained; fork the "
                    "run to train with other values",
                    run_id=run_id,
                )
            if check is not None:
                check(connection, run)
            if not values:
                return run
            if "spec_json" in values:
                values = {**values, "generation": run.generation + 1}
            data = {"changed": list(keys)}
            note = Note("RunChanged", f"changed {', '.join(keys)}", data, actor=actor)
            record_note(connection, run, note, **values)
            return get_run(connection, run_id)

    def delete(self, run_id: str, *, revision: int) -> None:
        """Deletes a run that has ended.

        Raises:
            StaleRevisionError: If the run's revision is not ``revision``.
            NotTerminalError: If it has not ended.
        """
        with self.database.write() as connection:
            check_deletable(get_run(connection, run_id, lock=True), revision)
            connection.execute(IDEMPOTENCY_KEYS.delete().where(IDEMPOTENCY_KEYS.c.run_id == run_id))
            connection.execute(RUNS.delete().where(RUNS.c.run_id == run_id))
            connection.execute(DELETED_RUNS.insert().values(run_id=run_id, delete_time=time.time()))

    def was_deleted(self, run_id: str) -> bool:
        """Returns True if a user deleted the run."""
        query = sa.select(DELETED_RUNS.c.run_id).where(DELETED_RUNS.c.run_id == run_id)
        with self.database.read() as connection:
            return connection.execute(query).first() is not None

    def begin_attempt(self, run_id: str) -> int:
        """Counts a new attempt to drive the run; returns its number, from 1."""
        with self.database.write() as connection:
            connection.execute(
                RUNS.update()
                .where(RUNS.c.run_id == run_id)
                .values(num_attempts=RUNS.c.num_attempts + 1)
            )
            query = sa.select(RUNS.c.num_attempts).where(RUNS.c.run_id == run_id)
            return int(connection.execute(query).scalar_one())

    def events(
        self,
        run_id: str,
        *,
        after_seq: int = 0,
        limit: int = 1000,
        only: EventFilter = ALL_EVENTS,
    ) -> list[Event]:
        """Returns events of a run after ``after_seq``; 0 begins with the oldest stored one.

        Raises:
            CursorExpiredError: If events after ``after_seq`` are no longer stored.
        """
        with self.database.read() as connection:
            return read_events(connection, run_id, after_seq=after_seq, limit=limit, only=only)

    def newest_seq(self, run_id: str) -> int:
        """Returns the number of a run's newest event; 0 without any."""
        with self.database.read() as connection:
            return int(connection.execute(NEWEST_SEQ, {"run": run_id}).scalar_one())

    def events_since(self, project: str, moment: float, *, limit: int = 1000) -> list[Event]:
        """Returns the events of all runs of a project after a moment, in order.

        Raises:
            CursorExpiredError: If some of them are no longer stored.
        """
        query = (
            sa.select(EVENTS)
            .join(RUNS, RUNS.c.run_id == EVENTS.c.run_id)
            .where(RUNS.c.project == project, EVENTS.c.time > moment)
            .order_by(EVENTS.c.time, EVENTS.c.run_id, EVENTS.c.seq)
            .limit(limit)
        )
        with self.database.read() as connection:
            if has_forgotten(connection, project, moment, num_kept=self._events_kept):
                raise CursorExpiredError(
                    f"events of project {project!r} after {moment} are no longer stored; list its runs and "
                    "continue without a cursor"
                )
            return [to_event(row) for row in connection.execute(query)]


def check_deletable(run: Run, revision: int) -> None:
    """Checks that a run may be deleted.

    Raises:
        StaleRevisionError: If the run's revision is not ``revision``.
        NotTerminalError: If it has not ended.
    """
    _check_revision(run, revision)
    if not run.is_terminal:
        raise NotTerminalError(
            f"run {run.run_id} is {run.state}; cancel it before you delete it", run_id=run.run_id
        )


def _check_revision(run: Run, revision: int) -> None:
    if run.revision != revision:
        raise StaleRevisionError(
            f"run {run.run_id} has revision {run.revision}, not {revision}; read it again",
            run_id=run.run_id,
            revision=run.revision,
        )
