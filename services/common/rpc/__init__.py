"""gRPC: clients, servers, headers, messages."""
