"""Pages of a run's events. The function works inside a transaction that its caller opened."""

from typing import Any

import sqlalchemy as sa

from services.common.errors import FailedPreconditionError
from services.controller.store.records import ALL_EVENTS, Event, EventFilter
from services.controller.store.rows import to_event
from services.controller.store.tables import EVENTS

# Used many times a second, so they are put together once.
_EVENTS = (
    sa.select(EVENTS)
    .where(EVENTS.c.run_id == sa.bindparam("run"), EVENTS.c.seq > sa.bindparam("after"))
    .limit(sa.bindparam("most"))
)
_EVENTS_IN_ORDER = _EVENTS.order_by(EVENTS.c.seq)
_OLDEST_SEQ = sa.select(sa.func.min(EVENTS.c.seq)).where(EVENTS.c.run_id == sa.bindparam("run"))


class CursorExpiredError(FailedPreconditionError):
    """Events behind the cursor are not kept any more."""

    reason = "CURSOR_EXPIRED"


def read_events(
    connection: sa.Connection, run_id: str, *, after_seq: int, limit: int, only: EventFilter
) -> list[Event]:
    """Events of a run behind ``after_seq``; 0 begins with the oldest that is kept.

    Raises:
        CursorExpiredError: If events behind ``after_seq`` are not kept any more.
    """
    query = _filtered(only)
    oldest = connection.execute(_OLDEST_SEQ, {"run": run_id}).scalar() if after_seq else 0
    if after_seq < (oldest or 0) - 1:
        raise CursorExpiredError(
            f"events of run {run_id} behind {after_seq} are not kept any more; read the run, and "
            "go on without a cursor",
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
