"""Client of the data plane, and the encodings and channels that it shares with the shards."""
