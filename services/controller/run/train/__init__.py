"""Training side of a run: batches, steps, checkpoints, time sharing of GPUs."""
