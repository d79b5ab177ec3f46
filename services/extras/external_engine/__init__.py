"""Engines in separate processes: requests as segments of tokens, and weights that their workers copy."""
