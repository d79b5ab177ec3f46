"""Weights in torch's distributed checkpoints (DCP)."""
