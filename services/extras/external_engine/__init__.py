"""Engines in processes of their own: requests as segments of tokens, and weights that their workers copy."""
