"""Sandboxes of episodes outside the rollout's own process tree: containers, pods and E2B."""
