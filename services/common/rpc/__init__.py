"""gRPC: clients, servers, headers."""
