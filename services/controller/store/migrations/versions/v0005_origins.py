"""Which release wrote a specification, and which token an API token was made for."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Apply."""
    op.add_column(
        "runs", sa.Column("release", sa.String(length=63), nullable=False, server_default="")
    )
    op.add_column("api_tokens", sa.Column("parent_digest", sa.String(length=64), nullable=True))
