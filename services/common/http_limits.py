"""Connections that ask nothing do not take a server's descriptors: header deadlines, a limit per peer."""

import asyncio
import logging
import resource
import socket
import time
from collections import Counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.common.rare_log import PERIOD_S, RareLog

logger = logging.getLogger(__name__)

HEADER_DEADLINE_S = 10.0
"""Seconds from a connection, or from the first byte of a further request, to the end of the headers; and
before it as many for the handshake of TLS."""


class Connections:
    """Connections that are open, by peer. Belongs to the event loop's thread.

    Args:
        most_per_peer: Connections of one address at once; 0 for no bound.
    """

    def __init__(self, most_per_peer: int) -> None:
        self._most = most_per_peer
        self._open: Counter[str] = Counter()
        self._log = RareLog(logger)

    def open(self, peer: str) -> bool:
        """Count a connection, unless its peer has as many as it may."""
        if 0 < self._most <= self._open[peer]:
            self.refuse(peer, "too many connections")
            return False
        self._open[peer] += 1
        return True

    def close(self, peer: str) -> None:
        """Forget a connection that was counted."""
        self._open[peer] -= 1
        if not self._open[peer]:
            del self._open[peer]

    def refuse(self, peer: str, reason: str) -> None:
        """Tell of a connection that was ended."""
        self._log.warning("a connection was ended", peer=peer, reason=reason)


class CountedListener(socket.socket):
    """Accepts connections that are counted until they are closed, those that only shake hands among them."""

    connections: Connections

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept one.

        Raises:
            ConnectionAbortedError: If its peer has as many as it may; it is closed.
        """
        accepted, address = super().accept()
        counted = _Counted(accepted.family, accepted.type, accepted.proto, accepted.detach())
        # Processes of this machine that come over a Unix socket have no address.
        peer = str(address[0]) if address else ""
        if not self.connections.open(peer):
            counted.close()
            raise ConnectionAbortedError
        counted.opened = (self.connections, peer)
        return counted, address


class _Counted(socket.socket):
    opened: tuple[Connections, str] | None = None

    def close(self) -> None:
        if self.opened is not None:
            connections, peer = self.opened
            self.opened = None
            connections.close(peer)
        super().close()


def counted(listener: socket.socket, connections: Connections) -> CountedListener:
    """The same listening socket, whose connections are counted."""
    parts = listener.family, listener.type, listener.proto
    made = CountedListener(*parts, listener.detach())
    made.connections = connections
    return made


class LimitedProtocol(HttpToolsProtocol):
    """Connections that must say what they want in time."""

    connections_by_peer: Connections
    header_deadline_s: float
    _peer = ""
    _deadline: asyncio.TimerHandle | None = None
    _is_in_headers = False

    def connection_made(self, transport: Any) -> None:
        """Wait for the first request."""
        self._peer = str((transport.get_extra_info("peername") or ("",))[0])
        super().connection_made(transport)
        self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._headers_are_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Wait for the rest of the headers: most requests bring all of them at once, and need no timer."""
        super().data_received(data)
        if self._is_in_headers:
            self._wait_for_headers()

    def on_message_begin(self) -> None:
        """Take in a request."""
        self._is_in_headers = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Have what was waited for."""
        self._headers_are_here()
        super().on_headers_complete()

    def _wait_for_headers(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.header_deadline_s, self._is_late)

    def _headers_are_here(self) -> None:
        self._is_in_headers = False
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_late(self) -> None:
        self.connections_by_peer.refuse(self._peer, "no complete request in time")
        self.transport.abort()


def limited(connections: Connections, header_deadline_s: float) -> type[asyncio.Protocol]:
    """A protocol with its limits."""
    given = {"connections_by_peer": connections, "header_deadline_s": header_deadline_s}
    return type("Limited", (LimitedProtocol,), given)


def raise_descriptor_limit() -> int:
    """Let this process have as many open files as it may; returns how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 20


class OncePerMinute(logging.Filter):
    """Lets asyncio tell once a minute that it can take no connection, not of each of them."""

    _told = -PERIOD_S

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is told."""
        if not str(record.msg).startswith("socket.accept()"):
            return True
        now = time.monotonic()
        if now - self._told < PERIOD_S:
            return False
        self._told = now
        return True
