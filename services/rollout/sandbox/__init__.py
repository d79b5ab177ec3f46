"""Sandboxes: one for each episode, and one for each program of the reward ``code_tests``."""
