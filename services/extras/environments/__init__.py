"""Environments of other projects: tasks of Harbor, servers of OpenEnv, environments of verifiers."""
