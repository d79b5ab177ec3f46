"""Detection of peers whose host is gone, on connections that a library opened without keepalive."""

import socket
from contextlib import suppress
from pathlib import Path

SILENCE_S = 30
"""Seconds after which a connection to a host that does not answer fails."""
_IDLE_S = 10
_PROBES = 4


def watch_connections() -> None:
    """Lets the kernel end each TCP connection of this process whose peer's host is silent for 30 s.

    Without this, a wait for data of a lost peer never ends, and a wait for its acknowledgements
    after 15 minutes. Over a slow link, acknowledgements arrive. Call it again for connections that
    are opened later. Does nothing where the socket options of Linux are missing.
    """
    for entry in Path("/proc/self/fd").iterdir() if hasattr(socket, "TCP_USER_TIMEOUT") else ():
        with suppress(OSError):  # closed meanwhile, or no connection
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.fromfd(int(entry.name), socket.AF_INET, socket.SOCK_STREAM) as copy:
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL) == socket.IPPROTO_TCP:
                    _watch(copy)


def _watch(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval_s = (SILENCE_S - _IDLE_S) // _PROBES
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE_S),
        ("TCP_KEEPINTVL", interval_s),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", SILENCE_S * 1000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
