"""Publishes samples to the transferqueue."""
