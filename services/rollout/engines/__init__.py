"""Generation engines with a common protocol."""
