"""Checkpoints: training state on disk."""
