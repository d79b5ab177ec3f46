"""Activations in host memory between the passes of a micro-batch."""
