"""Rewards: map a response to a number or to a typed failure."""
