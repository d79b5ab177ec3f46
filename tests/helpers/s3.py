"""A server of the S3 protocol, and a connection to it that can be cut.

The server is moto's, in a separate environment (``make s3-server``).
"""

import os
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Literal

import pytest

PYTHON = Path(
    os.environ.get("SLIPSTREAM_S3_PYTHON", Path(__file__).parents[2] / ".venv-s3/bin/python")
)
LOOPBACK = "127.0.0.1"
_SERVER = """
import logging, sys
logging.getLogger("werkzeug").setLevel(logging.ERROR)
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address=sys.argv[1], port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
_STORAGE_FULL = (
    b"HTTP/1.1 507 Insufficient Storage\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)
_numbers = count()

needs_s3 = pytest.mark.skipif(
    not PYTHON.exists() and not os.environ.get("CI"),
    reason="no server of the S3 protocol: run 'make s3-server'",
)


@contextmanager
def s3_server(host: str = LOOPBACK) -> Iterator[int]:
    """Starts a server whose objects are in its memory; yields its port."""
    with started(_SERVER, host) as port:
        yield port


@contextmanager
def started(program: str, *arguments: str) -> Iterator[int]:
    """Starts a program in moto's environment, which prints its port; yields the port."""
    process = subprocess.Popen(
        [PYTHON, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        lines = iter(process.stdout.readline, "")
        port = next(int(line) for line in lines if line.strip().isdecimal())
        yield port
    finally:
        process.stdin.close()
        process.kill()
        process.wait()


@dataclass
class Relay:
    """Forwards connections to a port; refuses them, or answers that it is full, on a test's request."""

    target: int
    mode: Literal["forward", "refuse", "full"] = "forward"
    port: int = 0
    num_bytes: int = 0
    """Bytes that clients sent."""
    cut_after: int | None = None
    """If set, refuses from the moment at which clients have sent so many bytes."""
    _listener: socket.socket = field(init=False)
    _connections: list[socket.socket] = field(default_factory=list)

    def __enter__(self) -> "Relay":
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.close()
        self.set("refuse")

    def set(self, mode: Literal["forward", "refuse", "full"]) -> None:
        """Changes the mode, and cuts all connections unless they are forwarded."""
        self.mode = mode
        if mode != "forward":
            for connection in [*self._connections]:
                _close(connection)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.mode == "refuse":
                    _close(client)
                elif self.mode == "full":
                    threading.Thread(target=self._refuse, args=(client,), daemon=True).start()
                else:
                    server = socket.create_connection(("127.0.0.1", self.target))
                    self._connections += [client, server]
                    for pair in ((client, server), (server, client)):
                        threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _refuse(self, client: socket.socket) -> None:
        with suppress(OSError):
            client.recv(1 << 16)
            client.sendall(_STORAGE_FULL)
            client.shutdown(socket.SHUT_WR)
            while client.recv(1 << 16):
                """Read what the client still sends, so that it gets the answer."""
        _close(client)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(1 << 16):
                if source.getsockname()[1] == self.port:
                    self.num_bytes += len(content)
                    if self.cut_after is not None and self.num_bytes >= self.cut_after:
                        self.set("refuse")
                target.sendall(content)
        _close(source)
        _close(target)


def _close(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def environment(port: int, host: str = LOOPBACK) -> dict[str, str]:
    """Returns the environment variables of a client of the server."""
    return {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }


def new_bucket(port: int, host: str = LOOPBACK) -> str:
    """Creates a bucket with a new name; returns its URL."""
    name = f"bucket-{os.getpid()}-{next(_numbers)}"
    request = urllib.request.Request(f"http://{host}:{port}/{name}", method="PUT")
    with urllib.request.urlopen(request, timeout=30):
        return f"s3://{name}"
