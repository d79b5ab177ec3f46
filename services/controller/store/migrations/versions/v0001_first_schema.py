"""Marks the first schema. New databases get the tables of ``METADATA`` and the newest revision."""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Changes nothing; no database is older."""
