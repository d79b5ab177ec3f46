"""Moves the returned rows of ledgers from a column, which each write replaced, into their own table."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Creates the table ``returned_rows`` and fills it from ``ledgers.returned_json``."""
    rows = op.create_table(
        "returned_rows",
        sa.Column(
            "run_id",
            sa.String(40),
            sa.ForeignKey("runs.run_id", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("row", sa.BigInteger, primary_key=True),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("is_waiting", sa.Boolean, nullable=False),
    )
    op.add_column(
        "ledgers",
        sa.Column("refilled_before", sa.BigInteger, nullable=False, server_default="0"),
    )
    connection = op.get_bind()
    ledgers = sa.table(
        "ledgers",
        *map(sa.column, ("run_id", "returned_json", "reasons_json", "refilled_before")),
    )
    for ledger in connection.execute(sa.select(ledgers)).all():
        ledger_state = json.loads(ledger.returned_json) or {"epoch": 0, "waiting": [], "known": []}
        waiting = set(ledger_state["waiting"])
        values = [
            {
                "run_id": ledger.run_id,
                "row": row,
                "number": number,
                "epoch": ledger_state["epoch"],
                "is_waiting": row in waiting,
            }
            for number, row in enumerate(ledger_state["known"])
        ]
        if values:
            connection.execute(rows.insert(), values)
        refilled = json.loads(ledger.reasons_json).get("equal_rewards", 0)
        connection.execute(
            ledgers.update()
            .where(ledgers.c.run_id == ledger.run_id)
            .values(refilled_before=refilled)
        )
    op.drop_column("ledgers", "returned_json")
