"""Times and needs of runs, sizes of checkpoints, further quotas."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Apply."""
    for name in ("start_time", "finish_time"):
        op.add_column("runs", sa.Column(name, sa.Float(53), nullable=True))
    for table, name, kind in (
        ("runs", "gpus", sa.Integer()),
        ("runs", "transferqueue_bytes", sa.BigInteger()),
        ("checkpoints", "size_bytes", sa.BigInteger()),
        ("quotas", "max_checkpoint_bytes", sa.BigInteger()),
        ("quotas", "max_requests_per_second", sa.Integer()),
        ("quotas", "max_event_streams", sa.Integer()),
    ):
        op.add_column(table, sa.Column(name, kind, nullable=False, server_default="0"))
