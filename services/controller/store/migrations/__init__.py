"""Migrations of the controller's database; alembic runs them at start."""
