"""Checks before a start on this machine: everything that a specification names, and what the machine has."""
