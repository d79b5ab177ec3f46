"""Channels between processes for both ends: ZeroMQ, Unix sockets, shared memory, the object store."""
