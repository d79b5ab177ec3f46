"""Rewards: from a response to a number, or to a typed failure."""
