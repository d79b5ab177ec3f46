"""Clients of the metadata service and the shard registry, and their types; no torch."""
