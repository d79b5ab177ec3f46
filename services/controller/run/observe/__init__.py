"""Progress, stalls, waiting times and advice of a run, for people."""
