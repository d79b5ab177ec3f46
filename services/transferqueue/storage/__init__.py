"""Storage shard of the transferqueue: its blobs and its data socket."""
