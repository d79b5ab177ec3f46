"""Durable state of runs and their events: SQLAlchemy Core on SQLite.

Every change of a run and the event that tells of it are one transaction.
"""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event as sa_event

from services.common.errors import AlreadyExistsError, FailedPreconditionError, NotFoundError
from services.controller.run_state import TERMINAL, RunEvent, RunState, next_state

_METADATA = sa.MetaData()

_RUNS = sa.Table(
    "runs",
    _METADATA,
    sa.Column("run_id", sa.String(40), primary_key=True),
    sa.Column("name", sa.String(63), nullable=False),
    sa.Column("spec_json", sa.Text, nullable=False),
    sa.Column("spec_digest", sa.String(64), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("state_reason", sa.String(64), nullable=False),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("weight_version", sa.BigInteger, nullable=False),
    sa.Column("summary_json", sa.Text, nullable=False),
    sa.Column("create_time", sa.Float, nullable=False),
    sa.Column("update_time", sa.Float, nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("request_id", sa.String(64), unique=True, nullable=True),
)

_EVENTS = sa.Table(
    "events",
    _METADATA,
    sa.Column("run_id", sa.String(40), sa.ForeignKey("runs.run_id"), primary_key=True),
    sa.Column("seq", sa.BigInteger, primary_key=True),
    sa.Column("time", sa.Float, nullable=False),
    sa.Column("type", sa.String(32), nullable=False),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("data_json", sa.Text, nullable=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as it is stored."""

    run_id: str
    name: str
    spec_json: str
    spec_digest: str
    state: RunState
    state_reason: str
    message: str
    step: int
    weight_version: int
    summary: Mapping[str, Any]
    """Progress in numbers: prompts by state, staleness, held-out scores, sync latency."""
    create_time: float
    update_time: float
    revision: int

    @property
    def is_terminal(self) -> bool:
        """Whether the run has ended."""
        return self.state in TERMINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a run."""

    run_id: str
    seq: int
    """From 1, without gaps."""
    time: float
    type: str
    message: str
    data: Mapping[str, Any]


class RunStore:
    """Runs and events in one SQLite file; thread-safe, one writer at a time.

    Args:
        path: The database file; its folder exists.
    """

    def __init__(self, path: Path) -> None:
        self._engine = sa.create_engine(f"sqlite:///{path}", connect_args={"timeout": 30})
        sa_event.listen(self._engine, "connect", _set_pragmas)
        self._writer = threading.Lock()
        _METADATA.create_all(self._engine)

    def close(self) -> None:
        """Close the database."""
        self._engine.dispose()

    def create(
        self, run_id: str, *, name: str, spec_json: str, spec_digest: str, request_id: str | None
    ) -> tuple[Run, bool]:
        """Store a new run in state QUEUED.

        Returns:
            The run, and whether it is new: a ``request_id`` seen before returns its run.

        Raises:
            AlreadyExistsError: If the ``request_id`` came with another specification.
        """
        now = time.time()
        with self._write() as connection:
            if request_id is not None:
                query = sa.select(_RUNS).where(_RUNS.c.request_id == request_id)
                if (row := connection.execute(query).first()) is not None:
                    if row.spec_digest != spec_digest:
                        raise AlreadyExistsError(
                            f"request id {request_id!r} was used for another specification; take a new id",
                            request_id=request_id,
                        )
                    return _run(row), False
            connection.execute(
                _RUNS.insert().values(
                    run_id=run_id,
                    name=name,
                    spec_json=spec_json,
                    spec_digest=spec_digest,
                    state=RunState.QUEUED.value,
                    state_reason="Submitted",
                    message="",
                    step=0,
                    weight_version=-1,
                    summary_json="{}",
                    create_time=now,
                    update_time=now,
                    revision=1,
                    request_id=request_id,
                )
            )
            _append(connection, run_id, "Submitted", "the run was submitted", {"name": name})
            return self._get(connection, run_id), True

    def get(self, run_id: str) -> Run:
        """One run.

        Raises:
            NotFoundError: If there is none of that id.
        """
        with self._engine.connect() as connection:
            return self._get(connection, run_id)

    def list_runs(self, *, limit: int, before: str | None = None) -> list[Run]:
        """Runs, newest first, starting behind ``before``."""
        query = sa.select(_RUNS).order_by(_RUNS.c.run_id.desc()).limit(limit)
        if before is not None:
            query = query.where(_RUNS.c.run_id < before)
        with self._engine.connect() as connection:
            return [_run(row) for row in connection.execute(query)]

    def apply(self, run_id: str, event: RunEvent, *, reason: str, message: str = "") -> Run:
        """Move a run to the state that ``event`` leads to.

        Raises:
            FailedPreconditionError: If the run's state does not take the event.
        """
        with self._write() as connection:
            run = self._get(connection, run_id)
            state = next_state(run.state, event)
            if state is None:
                raise FailedPreconditionError(
                    f"run {run_id} is {run.state} and cannot {event}",
                    run_id=run_id,
                    state=run.state,
                )
            self._update(connection, run, state=state.value, state_reason=reason, message=message)
            _append(
                connection,
                run_id,
                "StateChanged",
                message or f"the run is {state.value}",
                {"from": run.state.value, "to": state.value, "reason": reason},
            )
            return self._get(connection, run_id)

    def record(
        self,
        run_id: str,
        type_: str,
        message: str,
        data: Mapping[str, Any],
        *,
        step: int | None = None,
        weight_version: int | None = None,
        summary: Mapping[str, Any] | None = None,
    ) -> Event:
        """Append an event and, in the same transaction, the progress that it tells of."""
        values: dict[str, Any] = {}
        if step is not None:
            values["step"] = step
        if weight_version is not None:
            values["weight_version"] = weight_version
        if summary is not None:
            values["summary_json"] = json.dumps(summary)
        with self._write() as connection:
            if values:
                self._update(connection, self._get(connection, run_id), **values)
            return _append(connection, run_id, type_, message, data)

    def events(
        self, run_id: str, *, after_seq: int = 0, limit: int = 1000, type_: str | None = None
    ) -> list[Event]:
        """Events of a run behind ``after_seq``, in order."""
        query = (
            sa.select(_EVENTS)
            .where(_EVENTS.c.run_id == run_id, _EVENTS.c.seq > after_seq)
            .order_by(_EVENTS.c.seq)
            .limit(limit)
        )
        if type_ is not None:
            query = query.where(_EVENTS.c.type == type_)
        with self._engine.connect() as connection:
            return [
                Event(
                    run_id=row.run_id,
                    seq=row.seq,
                    time=row.time,
                    type=row.type,
                    message=row.message,
                    data=json.loads(row.data_json),
                )
                for row in connection.execute(query)
            ]

    @contextmanager
    def _write(self) -> Iterator[sa.Connection]:
        with self._writer, self._engine.begin() as connection:
            yield connection

    @staticmethod
    def _get(connection: sa.Connection, run_id: str) -> Run:
        row = connection.execute(sa.select(_RUNS).where(_RUNS.c.run_id == run_id)).first()
        if row is None:
            raise NotFoundError(
                f"run {run_id!r} does not exist; list the runs there are", run_id=run_id
            )
        return _run(row)

    @staticmethod
    def _update(connection: sa.Connection, run: Run, **values: Any) -> None:
        connection.execute(
            _RUNS.update()
            .where(_RUNS.c.run_id == run.run_id)
            .values(update_time=time.time(), revision=run.revision + 1, **values)
        )


def _run(row: Any) -> Run:
    return Run(
        run_id=row.run_id,
        name=row.name,
        spec_json=row.spec_json,
        spec_digest=row.spec_digest,
        state=RunState(row.state),
        state_reason=row.state_reason,
        message=row.message,
        step=row.step,
        weight_version=row.weight_version,
        summary=json.loads(row.summary_json),
        create_time=row.create_time,
        update_time=row.update_time,
        revision=row.revision,
    )


def _append(
    connection: sa.Connection, run_id: str, type_: str, message: str, data: Mapping[str, Any]
) -> Event:
    newest = connection.execute(
        sa.select(sa.func.coalesce(sa.func.max(_EVENTS.c.seq), 0)).where(_EVENTS.c.run_id == run_id)
    ).scalar_one()
    event = Event(
        run_id=run_id, seq=newest + 1, time=time.time(), type=type_, message=message, data=data
    )
    connection.execute(
        _EVENTS.insert().values(
            run_id=run_id,
            seq=event.seq,
            time=event.time,
            type=type_,
            message=message,
            data_json=json.dumps(data),
        )
    )
    return event


def _set_pragmas(connection: Any, record: Any) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=30000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
