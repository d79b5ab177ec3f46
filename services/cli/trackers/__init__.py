"""Writes runs to experiment trackers, from the API's events and beside everything that trains."""
