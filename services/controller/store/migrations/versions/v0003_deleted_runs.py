"""Records which runs were deleted, to distinguish them from runs of a lost database."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Creates the table ``deleted_runs``."""
    op.create_table(
        "deleted_runs",
        sa.Column("run_id", sa.String(40), primary_key=True),
        sa.Column("delete_time", sa.Float(53), nullable=False),
    )
