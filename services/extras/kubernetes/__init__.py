"""Kubernetes: the launcher whose workers are pods, and RLRun objects that mirror runs."""
