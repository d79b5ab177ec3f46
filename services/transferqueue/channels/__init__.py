"""Ways between processes: ZeroMQ and unix sockets, shared memory, the object store; either end."""
