"""Ports for services that need a fixed port."""

import random
import socket


def free_port() -> int:
    """Returns a free port on loopback, below the range of ephemeral ports."""
    while True:
        port = random.randrange(10_000, 32_000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
