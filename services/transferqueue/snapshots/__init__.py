"""Snapshots of a run, index and bytes."""
