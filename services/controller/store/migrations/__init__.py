"""Migrations of the controller's database, run by alembic at start."""
