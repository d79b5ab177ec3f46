"""The weight plane: how new weights travel from the trainer to the rollouts."""
