"""Snapshots of a run's samples: index and bytes."""
