"""Adds the first attempt of a group whose cached tokens may be resumed."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Applies the migration."""
    op.add_column(
        "prompts", sa.Column("first_attempt", sa.Integer(), nullable=False, server_default="1")
    )
