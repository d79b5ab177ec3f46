"""Rollout workers: engines, environments and rewards turn prompt groups into scored samples."""
