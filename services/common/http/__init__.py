"""HTTP servers and their limits."""
