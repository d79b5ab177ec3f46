"""Evaluations of pinned weight versions."""
