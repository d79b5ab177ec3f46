"""Memory of a run's GPUs, predicted before a start; the same functions serve checks and workers."""
