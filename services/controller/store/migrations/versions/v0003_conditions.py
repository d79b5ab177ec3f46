"""Conditions, generations and queue deadlines of runs, quotas of GPUs and bytes."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Apply."""
    op.add_column(
        "runs", sa.Column("generation", sa.BigInteger(), nullable=False, server_default="1")
    )
    op.add_column(
        "runs", sa.Column("conditions_json", sa.Text(), nullable=False, server_default="[]")
    )
    op.add_column("runs", sa.Column("queue_deadline", sa.Float(53), nullable=True))
    for name, kind in (("max_gpus", sa.Integer()), ("max_transferqueue_bytes", sa.BigInteger())):
        op.add_column("quotas", sa.Column(name, kind, nullable=False, server_default="0"))
