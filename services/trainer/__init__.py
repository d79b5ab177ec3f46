"""Optimization: losses, advantages, corrections, the step and its checkpoints."""
