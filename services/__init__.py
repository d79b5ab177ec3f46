"""Slipstream: asynchronous reinforcement learning for language models, as services."""
