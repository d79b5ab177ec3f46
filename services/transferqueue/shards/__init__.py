"""The shards of a transferqueue: who is alive, which one holds a group."""
