"""Calls of user code in processes of its own."""
