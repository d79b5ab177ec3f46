"""Weight synchronization: transfers new weights from the trainer to the rollouts."""
