"""The client's ways to the bytes of a shard."""
