"""Storage shards of a transferqueue: registration, heartbeats, admission of clients."""
