"""Ledgers in the database. Every function works in a transaction that its caller opened."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from pydantic_core import from_json

from services.controller.rules.difficulty import PromptRate
from services.controller.rules.ledger import (
    Group,
    GroupFacts,
    GroupState,
    LedgerChange,
    LedgerState,
)
from services.controller.rules.prompts import ReturnedRow, ReturnedRows, ReturnedRowsChange
from services.controller.store.tables import (
    CHECKPOINTS,
    DEAD_LETTERS,
    LEDGERS,
    PROMPT_RATES,
    PROMPTS,
    RETURNED_ROWS,
    STEPS,
)

_CHUNK = 500
# Built once, because it is used many times per second.
_FORGET_PROMPTS = PROMPTS.delete().where(
    PROMPTS.c.run_id == sa.bindparam("run"),
    PROMPTS.c.sequence.in_(sa.bindparam("ended", expanding=True)),
)
_COLUMNS = ", ".join(("run_id", *GroupFacts._fields))
_CHANGES = ", ".join(f"{name} = excluded.{name}" for name in GroupFacts._fields[1:])
_PUT_PROMPTS = (
    f"INSERT INTO prompts ({_COLUMNS}) VALUES (?{', ?' * len(GroupFacts._fields)}) "  # noqa: S608
    f"ON CONFLICT (run_id, sequence) DO UPDATE SET {_CHANGES}"
)
_PUT_RATES = (
    "INSERT INTO prompt_rates (run_id, row, rate, tries, until) VALUES (?, ?, ?, ?, ?) "
    "ON CONFLICT (run_id, row) DO UPDATE SET "
    "rate = excluded.rate, tries = excluded.tries, until = excluded.until"
)
_PUT_RETURNED = (
    "INSERT INTO returned_rows (run_id, row, number, epoch, is_waiting) VALUES (?, ?, ?, ?, ?) "
    "ON CONFLICT (run_id, row) DO UPDATE SET "
    "number = excluded.number, epoch = excluded.epoch, is_waiting = excluded.is_waiting"
)
_METRICS = (
    sa.select(STEPS.c.step, STEPS.c.time, STEPS.c.metrics_json)
    .where(
        STEPS.c.run_id == sa.bindparam("run"),
        STEPS.c.step.in_(sa.bindparam("steps", expanding=True)),
        STEPS.c.is_committed,
    )
    .order_by(STEPS.c.step)
)
# Reads from the end of the index: max() would read every step.
_NEWEST_STEP = (
    sa.select(STEPS.c.step)
    .where(STEPS.c.run_id == sa.bindparam("run"), STEPS.c.is_committed)
    .order_by(STEPS.c.step.desc())
    .limit(1)
)
_MOVE_FRONTIER = LEDGERS.update().where(LEDGERS.c.run_id == sa.bindparam("run"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of a committed step."""

    step: int
    time: float
    metrics: Mapping[str, Any]
    """Numbers by name, and ``histograms``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Stored step and the groups that it trains."""

    step: int
    is_committed: bool
    weight_version: int
    """Weight version from which the step was trained."""
    groups: tuple[tuple[int, int, int, int], ...]
    """``(sequence, row, attempt, oldest_version)`` of each group, in the order of the batch."""
    metrics: Mapping[str, float]
    time: float


def write_change(connection: sa.Connection, run_id: str, change: LedgerChange) -> None:
    sequences = [group.sequence for group in change.ended]
    for begin in range(0, len(sequences), _CHUNK):
        chunk = sequences[begin : begin + _CHUNK]
        connection.execute(_FORGET_PROMPTS, {"run": run_id, "ended": chunk})
    _put_many(connection, _PUT_PROMPTS, run_id, change.groups)
    _put_many(connection, _PUT_RATES, run_id, change.rates)
    _write_returned(connection, run_id, change.returned)
    now = time.time()
    dead = [group for group in change.ended if group.state is not GroupState.CONSUMED]
    if dead:
        connection.execute(DEAD_LETTERS.insert(), [_dead(run_id, group, now) for group in dead])
    _write_frontier(
        connection,
        run_id,
        num_issued=change.num_issued,
        position=change.position,
        ended_json=json.dumps({state.value: count for state, count in change.counts.items()}),
        reasons_json=json.dumps(dict(change.reasons)),
        refilled_before=change.refilled_before,
    )


def _write_returned(connection: sa.Connection, run_id: str, change: ReturnedRowsChange) -> None:
    of_run = RETURNED_ROWS.c.run_id == run_id
    if change.is_new_epoch:
        connection.execute(RETURNED_ROWS.delete().where(of_run, ~RETURNED_ROWS.c.is_waiting))
    for begin in range(0, len(change.deleted), _CHUNK):
        chunk = change.deleted[begin : begin + _CHUNK]
        connection.execute(RETURNED_ROWS.delete().where(of_run, RETURNED_ROWS.c.row.in_(chunk)))
    _put_many(connection, _PUT_RETURNED, run_id, change.rows)


def _read_returned(connection: sa.Connection, run_id: str) -> ReturnedRows:
    columns = [RETURNED_ROWS.c[name] for name in ReturnedRow._fields]
    query = sa.select(*columns).where(RETURNED_ROWS.c.run_id == run_id)
    rows = connection.execute(query.order_by(RETURNED_ROWS.c.number))
    return ReturnedRows(ReturnedRow._make(row) for row in rows)


def read_ledger(connection: sa.Connection, run_id: str) -> LedgerState:
    """Reads the ledger of a run; it is empty if no group was issued yet."""
    frontier = connection.execute(sa.select(LEDGERS).where(LEDGERS.c.run_id == run_id)).first()
    if frontier is None:
        return LedgerState()
    rows = connection.execute(sa.select(PROMPTS).where(PROMPTS.c.run_id == run_id))
    return LedgerState(
        groups=tuple(_to_group(row) for row in rows),
        num_issued=frontier.num_issued,
        position=frontier.position,
        ended={GroupState(name): count for name, count in json.loads(frontier.ended_json).items()},
        reasons=json.loads(frontier.reasons_json),
        refilled_before=frontier.refilled_before,
        returned=_read_returned(connection, run_id),
        first_step=frontier.first_step,
    )


def _to_group(row: Any) -> Group:
    facts = {name: getattr(row, name) for name in GroupFacts._fields}
    return Group(**{**facts, "state": GroupState(row.state)})


def read_quarantined_rows(connection: sa.Connection, run_id: str) -> set[int]:
    """Returns the rows of the training data that are never issued again."""
    query = sa.select(DEAD_LETTERS.c.row).where(
        DEAD_LETTERS.c.run_id == run_id, DEAD_LETTERS.c.state == GroupState.QUARANTINED.value
    )
    return set(connection.execute(query).scalars())


def read_rates(connection: sa.Connection, run_id: str) -> list[PromptRate]:
    columns = [PROMPT_RATES.c[name] for name in PromptRate._fields]
    query = sa.select(*columns).where(PROMPT_RATES.c.run_id == run_id)
    return [PromptRate._make(row) for row in connection.execute(query)]


def begin_step(
    connection: sa.Connection, run_id: str, step: int, *, version: int, groups: Sequence[Group]
) -> None:
    """Records which groups a step trains, before the trainer receives the step."""
    connection.execute(STEPS.delete().where(STEPS.c.run_id == run_id, STEPS.c.step == step))
    connection.execute(
        STEPS.insert().values(
            run_id=run_id,
            step=step,
            is_committed=False,
            weight_version=version,
            groups_json=json.dumps(
                [
                    (group.sequence, group.row, group.attempt, group.oldest_version)
                    for group in groups
                ]
            ),
            metrics_json="{}",
            time=time.time(),
        )
    )


def commit_step(
    connection: sa.Connection, run_id: str, step: int, metrics: Mapping[str, Any]
) -> None:
    """Marks a step as trained, after the trainer has answered."""
    connection.execute(
        STEPS.update()
        .where(STEPS.c.run_id == run_id, STEPS.c.step == step)
        .values(is_committed=True, metrics_json=json.dumps(metrics), time=time.time())
    )


def read_steps(
    connection: sa.Connection, run_id: str, *, after: int = 0, limit: int | None = None
) -> list[StepRecord]:
    """Returns the steps of a run after step ``after``, in order; the last one may be uncommitted."""
    query = (
        sa.select(STEPS)
        .where(STEPS.c.run_id == run_id, STEPS.c.step > after)
        .order_by(STEPS.c.step)
        .limit(limit)
    )
    return [
        StepRecord(
            step=row.step,
            is_committed=row.is_committed,
            weight_version=row.weight_version,
            groups=tuple((s, r, a, v) for s, r, a, v in json.loads(row.groups_json)),
            metrics=json.loads(row.metrics_json),
            time=row.time,
        )
        for row in connection.execute(query)
    ]


def read_metrics(connection: sa.Connection, run_id: str, steps: Sequence[int]) -> list[StepMetrics]:
    """Returns the metrics of some steps, without their groups; omits uncommitted steps."""
    return [
        # Cached keys speed up parsing: a chart reads hundreds of steps with dozens of metrics each.
        StepMetrics(step=step, time=moment, metrics=from_json(metrics_json, cache_strings="keys"))
        for begin in range(0, len(steps), _CHUNK)
        for step, moment, metrics_json in connection.execute(
            _METRICS, {"run": run_id, "steps": steps[begin : begin + _CHUNK]}
        )
    ]


def forget_step(connection: sa.Connection, run_id: str, step: int) -> None:
    """Deletes a step that was begun but not trained."""
    connection.execute(STEPS.delete().where(STEPS.c.run_id == run_id, STEPS.c.step == step))


def newest_step(connection: sa.Connection, run_id: str) -> int:
    """Returns the last committed step; before the first, the step from which the run starts."""
    newest = connection.execute(_NEWEST_STEP, {"run": run_id}).scalar()
    return read_first_step(connection, run_id) if newest is None else int(newest)


def read_first_step(connection: sa.Connection, run_id: str) -> int:
    """Returns the step of the checkpoint from which a run starts; 0 if it starts from a model."""
    query = sa.select(LEDGERS.c.first_step).where(LEDGERS.c.run_id == run_id)
    return int(connection.execute(query).scalar() or 0)


def start_at(connection: sa.Connection, run_id: str, step: int) -> None:
    """Creates the empty ledger of a run that begins after ``step``."""
    _write_frontier(
        connection,
        run_id,
        num_issued=0,
        position=0,
        ended_json="{}",
        reasons_json="{}",
        first_step=step,
    )


def read_version_offset(connection: sa.Connection, run_id: str) -> int:
    """Returns the weight version of a run's step minus the step."""
    query = sa.select(LEDGERS.c.version_offset).where(LEDGERS.c.run_id == run_id)
    return int(connection.execute(query).scalar() or 0)


def set_version_offset(connection: sa.Connection, run_id: str, offset: int) -> None:
    """Sets the weight version of a run's step minus the step."""
    connection.execute(
        LEDGERS.update().where(LEDGERS.c.run_id == run_id).values(version_offset=offset)
    )


def roll_back(connection: sa.Connection, run_id: str, step: int) -> None:
    """Rolls a ledger back to the end of ``step``; later steps' groups and groups in flight restart.

    Checkpoints of later steps count as failed, because the trainer could not load them.
    """
    state = read_ledger(connection, run_id)
    in_flight = {group.sequence for group in state.groups}
    groups = [_again(group) for group in state.groups]
    for record in read_steps(connection, run_id, after=step):
        groups += [
            Group(sequence=sequence, row=row, attempt=attempt + 1, first_attempt=attempt + 1)
            for sequence, row, attempt, _ in record.groups
            if sequence not in in_flight
        ]
    connection.execute(STEPS.delete().where(STEPS.c.run_id == run_id, STEPS.c.step > step))
    # Otherwise these checkpoints would count as saved when training reaches their steps again.
    connection.execute(
        CHECKPOINTS.update()
        .where(
            CHECKPOINTS.c.run_id == run_id,
            CHECKPOINTS.c.state == "READY",
            CHECKPOINTS.c.step > step,
        )
        .values(state="FAILED", message=f"lost: the run continued after step {step}")
    )
    connection.execute(PROMPTS.delete().where(PROMPTS.c.run_id == run_id))
    _put_many(connection, _PUT_PROMPTS, run_id, [group.facts() for group in groups])
    counts = dict(state.ended)
    num_returned = len(groups) - len(in_flight)
    counts[GroupState.CONSUMED] = counts.get(GroupState.CONSUMED, 0) - num_returned
    connection.execute(
        LEDGERS.update()
        .where(LEDGERS.c.run_id == run_id)
        .values(ended_json=json.dumps({name.value: count for name, count in counts.items()}))
    )


def _again(group: Group) -> Group:
    return Group(
        sequence=group.sequence,
        row=group.row,
        attempt=group.attempt + 1,
        first_attempt=group.attempt + 1,
        failures=group.failures,
        losses=group.losses,
    )


def _write_frontier(connection: sa.Connection, run_id: str, **values: Any) -> None:
    updated = connection.execute(_MOVE_FRONTIER, {"run": run_id, **values})
    if updated.rowcount == 0:
        connection.execute(LEDGERS.insert().values(run_id=run_id, **values))


def _put_many(
    connection: sa.Connection, statement: str, run_id: str, rows: Sequence[tuple[Any, ...]]
) -> None:
    if rows:
        # Raw SQL, because it writes thousands of rows per second: SQLAlchemy takes longer to bind
        # their values than the database takes for everything else.
        mark = "?" if connection.dialect.paramstyle == "qmark" else "%s"
        connection.exec_driver_sql(statement.replace("?", mark), [(run_id, *row) for row in rows])


def _dead(run_id: str, group: Group, now: float) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "sequence": group.sequence,
        "row": group.row,
        "state": group.state.value,
        "attempt": group.attempt,
        "reason": group.reason[:64],
        "time": now,
    }


def copy_ledger(
    connection: sa.Connection,
    parent: str,
    child: str,
    *,
    step: int,
    version: int,
    has_same_prompts: bool,
) -> None:
    """Copies a run's ledger up to ``step`` to another run, with the groups issued but not trained by then.

    Args:
        has_same_prompts: True if rows mean the same prompts in both runs; otherwise the child issues
            its own data from the start.
    """
    for table in (LEDGERS, PROMPTS, PROMPT_RATES, RETURNED_ROWS, DEAD_LETTERS, STEPS):
        other_columns = [column for column in table.c if column.name != "run_id"]
        query = sa.select(sa.literal(child), *other_columns).where(table.c.run_id == parent)
        if table is STEPS:
            query = query.where(table.c.is_committed)
        names = ["run_id", *(column.name for column in other_columns)]
        connection.execute(table.insert().from_select(names, query))
    roll_back(connection, child, step)
    set_version_offset(connection, child, version - step)
    if not has_same_prompts:
        _forget_prompts(connection, child)


def _forget_prompts(connection: sa.Connection, run_id: str) -> None:
    """Drops the groups that were issued but not trained, because their rows refer to other data."""
    rows = connection.execute(sa.select(PROMPTS).where(PROMPTS.c.run_id == run_id)).all()
    connection.execute(PROMPTS.delete().where(PROMPTS.c.run_id == run_id))
    connection.execute(PROMPT_RATES.delete().where(PROMPT_RATES.c.run_id == run_id))
    connection.execute(RETURNED_ROWS.delete().where(RETURNED_ROWS.c.run_id == run_id))
    dropped_state = GroupState.DROPPED.value
    of_run = DEAD_LETTERS.c.run_id == run_id
    connection.execute(DEAD_LETTERS.update().where(of_run).values(state=dropped_state))
    if rows:
        connection.execute(
            DEAD_LETTERS.insert(),
            [
                {
                    "run_id": run_id,
                    "sequence": row.sequence,
                    "row": row.row,
                    "state": dropped_state,
                    "attempt": row.attempt,
                    "reason": "other_data",
                    "time": time.time(),
                }
                for row in rows
            ],
        )
    query = sa.select(LEDGERS.c.ended_json).where(LEDGERS.c.run_id == run_id)
    counts = json.loads(connection.execute(query).scalar() or "{}")
    quarantined = counts.pop(GroupState.QUARANTINED.value, 0)
    counts[dropped_state] = counts.get(dropped_state, 0) + quarantined + len(rows)
    connection.execute(
        LEDGERS.update()
        .where(LEDGERS.c.run_id == run_id)
        .values(position=0, ended_json=json.dumps(counts))
    )
