"""The ledger of a run as the beginning of another one's. Works inside the caller's transaction."""

import json
import time

import sqlalchemy as sa

from services.controller.rules.groups import GroupState
from services.controller.store.ledgers import roll_back, set_version_offset
from services.controller.store.tables import DEAD_LETTERS, LEDGERS, PROMPT_RATES, PROMPTS, STEPS


def copy_ledger(
    connection: sa.Connection,
    parent: str,
    child: str,
    *,
    step: int,
    version: int,
    has_same_prompts: bool,
) -> None:
    """Give a run the steps of another one up to ``step``, and what that one issued and did not train by then.

    Args:
        connection: The transaction.
        parent: The run that is copied.
        child: The run that gets the copy.
        step: Last step that is kept.
        version: Weight version of that step.
        has_same_prompts: Whether rows mean the same prompts in both; otherwise all begins anew behind
            the step.
    """
    for table in (LEDGERS, PROMPTS, PROMPT_RATES, DEAD_LETTERS, STEPS):
        others = [column for column in table.c if column.name != "run_id"]
        query = sa.select(sa.literal(child), *others).where(table.c.run_id == parent)
        if table is STEPS:
            query = query.where(table.c.is_committed)
        names = ["run_id", *(column.name for column in others)]
        connection.execute(table.insert().from_select(names, query))
    roll_back(connection, child, step)
    set_version_offset(connection, child, version - step)
    if not has_same_prompts:
        _forget_prompts(connection, child)


def _forget_prompts(connection: sa.Connection, run_id: str) -> None:
    """Give up what was issued and not trained: its rows are of other data."""
    rows = connection.execute(sa.select(PROMPTS).where(PROMPTS.c.run_id == run_id)).all()
    connection.execute(PROMPTS.delete().where(PROMPTS.c.run_id == run_id))
    connection.execute(PROMPT_RATES.delete().where(PROMPT_RATES.c.run_id == run_id))
    dropped = GroupState.DROPPED.value
    of_run = DEAD_LETTERS.c.run_id == run_id
    connection.execute(DEAD_LETTERS.update().where(of_run).values(state=dropped))
    if rows:
        connection.execute(
            DEAD_LETTERS.insert(),
            [
                {
                    "run_id": run_id,
                    "sequence": row.sequence,
                    "row": row.row,
                    "state": dropped,
                    "attempt": row.attempt,
                    "reason": "other_data",
                    "time": time.time(),
                }
                for row in rows
            ],
        )
    query = sa.select(LEDGERS.c.ended_json).where(LEDGERS.c.run_id == run_id)
    ended = json.loads(connection.execute(query).scalar() or "{}")
    quarantined = ended.pop(GroupState.QUARANTINED.value, 0)
    ended[dropped] = ended.get(dropped, 0) + quarantined + len(rows)
    connection.execute(
        LEDGERS.update()
        .where(LEDGERS.c.run_id == run_id)
        .values(position=0, returned_json="{}", ended_json=json.dumps(ended))
    )
