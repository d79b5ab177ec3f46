"""Generating side of a run: dispatches prompt groups and collects their samples."""
