"""Writes runs to experiment trackers from the API's events, independently of training."""
