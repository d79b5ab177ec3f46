"""Migrations, one file each, in a linear order."""
