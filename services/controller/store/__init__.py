"""What the controller keeps for ever: runs, events and ledgers in SQLite or PostgreSQL."""
