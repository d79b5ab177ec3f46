"""What integration tests share."""

import socket
from collections.abc import Callable

import pytest


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Find a free port on loopback."""

    def find() -> int:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            return listener.getsockname()[1]

    return find
