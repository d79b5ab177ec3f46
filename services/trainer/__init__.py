"""Trainer service: losses, advantages, off-policy corrections, training steps and checkpoints."""
