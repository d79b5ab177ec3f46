"""Runs user code in separate processes and calls external services."""
