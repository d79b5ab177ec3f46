"""Samples that are kept to be read, beyond the life of their keys."""
