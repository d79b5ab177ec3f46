"""Reward ``code_tests``: runs programs of responses in a sandbox, and their tests outside of its reach."""
