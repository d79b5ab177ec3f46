"""Records where the leading controller serves, so that others can forward connections to it."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Adds the column ``leases.address``."""
    op.add_column("leases", sa.Column("address", sa.String(255), nullable=False, server_default=""))
