"""Sandboxes of episodes: their protocol, the pool of a rollout, and the service that agents use."""
