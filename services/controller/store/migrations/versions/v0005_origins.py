"""Adds the release that wrote a specification and the token from which a token was derived."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Applies the migration."""
    op.add_column(
        "runs", sa.Column("release", sa.String(length=63), nullable=False, server_default="")
    )
    op.add_column("api_tokens", sa.Column("parent_digest", sa.String(length=64), nullable=True))
