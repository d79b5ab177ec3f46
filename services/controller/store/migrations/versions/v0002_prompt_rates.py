"""Adds the running success rates of prompts."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Applies the migration."""
    op.create_table(
        "prompt_rates",
        sa.Column("run_id", sa.String(length=40), nullable=False),
        sa.Column("row", sa.BigInteger(), nullable=False),
        sa.Column("rate", sa.Float(precision=53), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("until", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"],
            ["runs.run_id"],
            name=op.f("fk_prompt_rates_run_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("run_id", "row", name=op.f("pk_prompt_rates")),
    )
