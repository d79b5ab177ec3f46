"""Progress, stalls, waits and advice of a run, for people."""
