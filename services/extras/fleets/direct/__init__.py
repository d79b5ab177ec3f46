"""Weights that travel from the trainer to the workers of attached servers, past the rollout."""
