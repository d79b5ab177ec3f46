"""Predicts a run's speed with other GPUs, staleness bounds and concurrency from its rates; pure functions."""
