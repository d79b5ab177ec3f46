"""Processes of a trainer: rank 0 leads, the other ranks follow."""
