"""Adds the step of the checkpoint from which a run starts."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Applies the migration."""
    column = sa.Column("first_step", sa.BigInteger(), server_default="0", nullable=False)
    op.add_column("ledgers", column)
