"""Ports for services that must be told theirs."""

import random
import socket


def free_port() -> int:
    """A free port on loopback, below those that the system gives to whoever asks for any."""
    while True:
        port = random.randrange(10_000, 32_000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
