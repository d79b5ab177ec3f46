"""Client side of the data plane: connections to shards and transports of bytes."""
