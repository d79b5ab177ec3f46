"""Environments: the workflow that plays them, their processes and hosts, and those of other projects."""
