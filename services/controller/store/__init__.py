"""Durable state of the controller: runs, events and ledgers in SQLite or PostgreSQL."""
