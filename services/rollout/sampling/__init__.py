"""Samples prompt groups: episodes, progress, admission, liveness."""
