"""The bytes of one shard and its data socket."""
