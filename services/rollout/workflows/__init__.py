"""Workflows: how a prompt becomes an episode of sampled and observed turns."""
