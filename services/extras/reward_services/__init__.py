"""Programs that serve rewards over HTTP."""
