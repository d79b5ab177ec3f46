"""``slipstream backup`` and ``slipstream restore``: copies of the controller's SQLite database."""
