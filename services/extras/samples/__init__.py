"""``slipstream samples``: kept samples of a run as text or JSON lines."""
