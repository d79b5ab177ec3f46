"""Samples prompt groups: episodes, progress, admission, stalled episodes."""
