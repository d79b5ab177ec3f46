"""Rows that come once more, progress of interrupted groups, snapshots, events by time."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Apply."""
    op.add_column(
        "ledgers", sa.Column("returned_json", sa.Text(), nullable=False, server_default="{}")
    )
    for name, kind in (("num_unfinished", sa.Integer()), ("num_tokens", sa.BigInteger())):
        op.add_column("prompts", sa.Column(name, kind, nullable=False, server_default="0"))
    op.create_index("ix_events_time", "events", ["time"], unique=False)
    op.add_column(
        "checkpoints",
        sa.Column("snapshot_id", sa.String(length=40), nullable=False, server_default=""),
    )
