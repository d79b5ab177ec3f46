"""Reads and writes rows of runs and events, in a transaction that the caller opened."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import sqlalchemy as sa

from services.common.errors import AlreadyExistsError, FailedPreconditionError, NotFoundError
from services.common.host import steady_time
from services.controller.rules.run_state import TERMINAL, Condition, RunState, conditions_after
from services.controller.store.records import (
    ALL_EVENTS,
    Event,
    EventFilter,
    Needs,
    NewRun,
    Note,
    RequestKey,
    Run,
)
from services.controller.store.tables import CHECKPOINTS, EVENTS, IDEMPOTENCY_KEYS, REQUESTS, RUNS

IS_UNFINISHED = RUNS.c.state.not_in([state.value for state in TERMINAL])
"""SQL condition for runs that have not ended."""
# Max events of a type that :func:`event_data` reads; a resumed run needs no older ones.
_MAX_EVENTS = 10_000
_KEY_LIFE_S = 24 * 3600.0
# Built once, because they are used many times per second.
_RUN = sa.select(RUNS).where(RUNS.c.run_id == sa.bindparam("run"))
_RUN_TO_CHANGE = _RUN.with_for_update()
_CHANGE_RUN = RUNS.update().where(RUNS.c.run_id == sa.bindparam("run"))
_ADD_EVENT = EVENTS.insert()
# Fields of a record that are stored as columns unchanged.
_RUN_COLUMNS = tuple(
    field.name for field in fields(Run) if field.name in RUNS.c and field.name != "state"
)
# Columns whose changes raise the revision. Steps and conditions do not: they change far too often for a
# user to name the newest change.
_REVISED = frozenset({"state", "labels_json", "priority", "spec_json"})
_NEW_COLUMNS = tuple(field.name for field in fields(NewRun) if field.name in RUNS.c)
_EVENT_COLUMNS = tuple(field.name for field in fields(Event) if field.name in EVENTS.c)
NEWEST_SEQ = sa.select(sa.func.coalesce(sa.func.max(EVENTS.c.seq), 0)).where(
    EVENTS.c.run_id == sa.bindparam("run")
)

# Built once, because they are used many times per second.
_EVENTS = (
    sa.select(EVENTS)
    .where(EVENTS.c.run_id == sa.bindparam("run"), EVENTS.c.seq > sa.bindparam("after"))
    .limit(sa.bindparam("most"))
)
_EVENTS_IN_ORDER = _EVENTS.order_by(EVENTS.c.seq)
_OLDEST_SEQ = sa.select(sa.func.min(EVENTS.c.seq)).where(EVENTS.c.run_id == sa.bindparam("run"))
RequestKind = Literal["pause", "save", "evaluate", "resize", "restart_rollouts"]


class IdempotencyKeyReusedError(AlreadyExistsError):
    """The key was used with another request before."""

    reason = "IDEMPOTENCY_KEY_REUSED"


class NameTakenError(AlreadyExistsError):
    """Another run has the name."""

    reason = "NAME_TAKEN"


def check_name(connection: sa.Connection, new: NewRun) -> None:
    """Checks that a name is free: among a project's unfinished runs, names are unique.

    Raises:
        NameTakenError: If it is not free.
    """
    query = sa.select(RUNS.c.run_id).where(
        RUNS.c.project == new.project, RUNS.c.name == new.name, IS_UNFINISHED
    )
    if (run_id := connection.execute(query).scalar()) is not None:
        raise NameTakenError(
            f"the active run {run_id} of project {new.project!r} already has the name {new.name!r}; choose "
            "another name, or cancel that run",
            run_id=run_id,
        )


def get_run(connection: sa.Connection, run_id: str, *, lock: bool = False) -> Run:
    """Returns one run; ``lock`` protects it from other writers until the transaction ends.

    Raises:
        NotFoundError: If no run has that id.
    """
    row = connection.execute(_RUN_TO_CHANGE if lock else _RUN, {"run": run_id}).first()
    if row is None:
        raise NotFoundError(
            f"run {run_id!r} does not exist; list the runs of the project", run_id=run_id
        )
    return to_run(row)


def insert_run(connection: sa.Connection, new: NewRun) -> Note:
    """Inserts a new run in state QUEUED; returns the event to record for it."""
    now = time.time()
    note = Note("Submitted", "submitted", {"name": new.name})
    conditions = conditions_after((), note.type, note.message, note.data, generation=1, time=now)
    connection.execute(
        RUNS.insert().values(
            **{name: getattr(new, name) for name in _NEW_COLUMNS},
            target_steps=json.loads(new.spec_json).get("trainer", {}).get("steps") or 0,
            state=RunState.QUEUED.value,
            state_reason="Submitted",
            message="",
            labels_json=json.dumps(dict(new.labels)),
            summary_json="{}",
            num_attempts=0,
            create_time=now,
            update_time=now,
            revision=1,
            generation=1,
            conditions_json=_conditions_json(conditions),
            queue_deadline=queue_deadline(new.spec_json),
            **asdict(new.needs),
        )
    )
    return note


def update_run(connection: sa.Connection, run: Run, **values: Any) -> None:
    """Changes a run's columns; its revision counts changes of what users set, and of the state."""
    revision = run.revision + int(not _REVISED.isdisjoint(values))
    columns = {"update_time": time.time(), "revision": revision, **values}
    connection.execute(_CHANGE_RUN, {"run": run.run_id, **columns})


def set_target_steps(connection: sa.Connection, run_id: str, steps: int) -> None:
    connection.execute(_CHANGE_RUN, {"run": run_id, "target_steps": steps})


def record_note(connection: sa.Connection, run: Run, note: Note, **values: Any) -> Event:
    """Stores an event, and its effects on the run: changed columns and conditions."""
    conditions = conditions_after(
        run.conditions,
        note.type,
        note.message,
        note.data,
        generation=values.get("generation", run.generation),
        time=time.time(),
    )
    if conditions != run.conditions:
        values["conditions_json"] = _conditions_json(conditions)
    if values:
        update_run(connection, run, **values)
    return append_event(connection, run.run_id, note)


def _conditions_json(conditions: Sequence[Condition]) -> str:
    return json.dumps([asdict(condition) for condition in conditions])


def queue_deadline(spec_json: str) -> float | None:
    """Returns the time at which a run queued now exceeds its queue time-out; None means never.

    The time is that of :func:`steady_time`: a change of the clock makes no run expire or wait.
    """
    timeout_s = json.loads(spec_json).get("limits", {}).get("queue_timeout_s", 0)
    return steady_time() + timeout_s if timeout_s else None


def append_event(connection: sa.Connection, run_id: str, note: Note) -> Event:
    """Stores an event under the run's next number."""
    newest = connection.execute(NEWEST_SEQ, {"run": run_id}).scalar_one()
    event = Event(
        run_id=run_id,
        seq=newest + 1,
        time=time.time(),
        type=note.type,
        message=note.message,
        data=note.data,
        actor=note.actor,
    )
    connection.execute(
        _ADD_EVENT,
        {
            **{name: getattr(event, name) for name in _EVENT_COLUMNS},
            "data_json": json.dumps(dict(event.data)),
        },
    )
    return event


def forget_events(connection: sa.Connection, run_id: str, *, until: int) -> None:
    """Deletes the oldest events of a run, up to number ``until``."""
    connection.execute(EVENTS.delete().where(EVENTS.c.run_id == run_id, EVENTS.c.seq <= until))


def event_data(connection: sa.Connection, run_id: str, type_: str) -> list[dict[str, Any]]:
    """Returns the data of the newest events of a type, oldest first."""
    return [data for _, data in typed_event_data(connection, run_id, (type_,))]


def has_event(connection: sa.Connection, run_id: str, type_: str, key: str) -> bool:
    """Returns True if the data of an event of a type has this ``key``."""
    query = sa.select(EVENTS.c.data_json).where(
        EVENTS.c.run_id == run_id,
        EVENTS.c.type == type_,
        EVENTS.c.data_json.contains(json.dumps(key), autoescape=True),
    )
    return any(json.loads(text).get("key") == key for text in connection.scalars(query))


def typed_event_data(
    connection: sa.Connection, run_id: str, types: Sequence[str]
) -> list[tuple[str, dict[str, Any]]]:
    """Returns type and data of the newest events of several types, oldest first."""
    query = (
        sa.select(EVENTS.c.type, EVENTS.c.data_json)
        .where(EVENTS.c.run_id == run_id, EVENTS.c.type.in_(types))
        .order_by(EVENTS.c.seq.desc())
        .limit(_MAX_EVENTS)
    )
    return [(type_, json.loads(text)) for type_, text in connection.execute(query)][::-1]


def first_event(connection: sa.Connection, run_id: str, type_: str) -> Event | None:
    """Returns the oldest event of a type; None without one."""
    query = (
        sa.select(EVENTS)
        .where(EVENTS.c.run_id == run_id, EVENTS.c.type == type_)
        .order_by(EVENTS.c.seq)
        .limit(1)
    )
    row = connection.execute(query).first()
    return None if row is None else to_event(row)


def newest_event(connection: sa.Connection, run_id: str, types: Sequence[str]) -> Event | None:
    query = (
        sa.select(EVENTS)
        .where(EVENTS.c.run_id == run_id, EVENTS.c.type.in_(types))
        .order_by(EVENTS.c.seq.desc())
        .limit(1)
    )
    row = connection.execute(query).first()
    return None if row is None else to_event(row)


def newest_snapshot(connection: sa.Connection, run_id: str) -> str:
    """Returns the id of the transferqueue's snapshot in a run's newest checkpoint; empty if it has none."""
    query = (
        sa.select(CHECKPOINTS.c.snapshot_id)
        .where(CHECKPOINTS.c.run_id == run_id, CHECKPOINTS.c.state == "READY")
        .order_by(CHECKPOINTS.c.step.desc())
        .limit(1)
    )
    return str(connection.execute(query).scalar() or "")


def seen_request(connection: sa.Connection, request: RequestKey) -> str | None:
    """Returns the run that an equal request created within the last day, or None.

    Raises:
        IdempotencyKeyReusedError: If the request's key was used with another body.
    """
    connection.execute(
        IDEMPOTENCY_KEYS.delete().where(IDEMPOTENCY_KEYS.c.create_time < time.time() - _KEY_LIFE_S)
    )
    row = connection.execute(
        sa.select(IDEMPOTENCY_KEYS).where(
            IDEMPOTENCY_KEYS.c.scope == request.scope, IDEMPOTENCY_KEYS.c.key == request.key
        )
    ).first()
    if row is None:
        return None
    if row.body_digest != request.body_digest:
        raise IdempotencyKeyReusedError(
            f"the idempotency key {request.key!r} was used for a different request; use a new key",
            key=request.key,
        )
    return str(row.run_id)


def remember_request(connection: sa.Connection, request: RequestKey, run_id: str) -> None:
    connection.execute(
        IDEMPOTENCY_KEYS.insert().values(
            scope=request.scope,
            key=request.key,
            body_digest=request.body_digest,
            run_id=run_id,
            create_time=time.time(),
        )
    )


def to_run(row: Any) -> Run:
    """Converts a row into a run; list queries omit the specification."""
    columns: dict[str, Any] = {name: getattr(row, name, "") for name in _RUN_COLUMNS}
    return Run(
        **columns,
        state=RunState(row.state),
        labels=json.loads(row.labels_json),
        summary=json.loads(row.summary_json),
        needs=Needs(gpus=row.gpus, transferqueue_bytes=row.transferqueue_bytes),
        conditions=tuple(Condition(**values) for values in json.loads(row.conditions_json)),
    )


def to_event(row: Any) -> Event:
    data = json.loads(row.data_json)
    return Event(**{name: getattr(row, name) for name in _EVENT_COLUMNS}, data=data)


def has_forgotten(connection: sa.Connection, project: str, moment: float, *, num_kept: int) -> bool:
    """Returns True if events of a project after a moment were deleted; a run keeps its last ``num_kept``."""
    # Only runs with more than ``kept`` events can have lost any.
    is_long = sa.exists().where(EVENTS.c.run_id == RUNS.c.run_id, EVENTS.c.seq > num_kept)
    for run_id in connection.scalars(
        sa.select(RUNS.c.run_id).where(RUNS.c.project == project, is_long)
    ).all():
        oldest = (
            sa.select(EVENTS.c.seq, EVENTS.c.time)
            .where(EVENTS.c.run_id == run_id)
            .order_by(EVENTS.c.seq)
            .limit(1)
        )
        row = connection.execute(oldest).one()
        if row.seq > 1 and row.time > moment:
            return True
    return False


class CursorExpiredError(FailedPreconditionError):
    """Events after the cursor are no longer stored."""

    reason = "CURSOR_EXPIRED"


def read_events(
    connection: sa.Connection, run_id: str, *, after_seq: int, limit: int, only: EventFilter
) -> list[Event]:
    """Returns events of a run after ``after_seq``; 0 begins with the oldest stored one.

    Raises:
        CursorExpiredError: If events after ``after_seq`` are no longer stored.
    """
    query = _filtered(only)
    oldest = connection.execute(_OLDEST_SEQ, {"run": run_id}).scalar() if after_seq else 0
    if after_seq < (oldest or 0) - 1:
        raise CursorExpiredError(
            f"events of run {run_id} after {after_seq} are no longer stored; read the run and continue "
            "without a cursor",
            run_id=run_id,
        )
    values = {"run": run_id, "after": after_seq, "most": limit}
    return [to_event(row) for row in connection.execute(query, values)]


def _filtered(only: EventFilter) -> sa.Select[Any]:
    if only == ALL_EVENTS:
        return _EVENTS_IN_ORDER
    query = _EVENTS.order_by(EVENTS.c.seq.desc() if only.is_newest_first else EVENTS.c.seq)
    if only.types:
        query = query.where(EVENTS.c.type.in_(only.types))
    if only.not_types:
        query = query.where(EVENTS.c.type.not_in(only.not_types))
    if only.before_seq is not None:
        query = query.where(EVENTS.c.seq < only.before_seq)
    return query


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Request of a user, or of a controller, to a run."""

    kind: RequestKind
    request_id: str
    """Unique id; a repeated request has a new one."""
    options: Mapping[str, int]
    """Numbers and booleans by name."""


def read_requests(connection: sa.Connection, run_id: str) -> list[Request]:
    """Returns the pending requests of a run, at most one of each kind."""
    rows = connection.execute(sa.select(REQUESTS).where(REQUESTS.c.run_id == run_id))
    return [
        Request(kind=row.kind, request_id=row.request_id, options=json.loads(row.options_json))
        for row in rows
    ]


def write_request(connection: sa.Connection, run_id: str, request: Request) -> None:
    """Stores a request and replaces an earlier one of its kind."""
    forget_requests(connection, run_id, request.kind)
    connection.execute(
        REQUESTS.insert().values(
            run_id=run_id,
            kind=request.kind,
            request_id=request.request_id,
            options_json=json.dumps(dict(request.options)),
        )
    )


def forget_requests(
    connection: sa.Connection, run_id: str, kind: RequestKind | None = None, request_id: str = ""
) -> None:
    """Deletes requests of a run: all, those of a kind, or one if it was not replaced meanwhile."""
    query = REQUESTS.delete().where(REQUESTS.c.run_id == run_id)
    if kind is not None:
        query = query.where(REQUESTS.c.kind == kind)
    if request_id:
        query = query.where(REQUESTS.c.request_id == request_id)
    connection.execute(query)
