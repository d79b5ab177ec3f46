"""Bounds what the connections of an HTTP server cost it: descriptors, memory, and time.

A request's line and headers have at most 64 KiB and 100 fields. Requests that are being received or answered
have a bound for all connections together: the largest is ended first, so a small one is served however many
large ones come. What is slow is ended by deadlines.
"""

import asyncio
import logging
import resource
import socket
import time
from collections import Counter
from typing import Any, ClassVar, Protocol

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.common.telemetry.logging import PERIOD_S, RareLog

logger = logging.getLogger(__name__)

HEADER_DEADLINE_S = 10.0
"""Seconds from a connection, or from the first byte of a further request, to the end of the headers; and
before it as many for the handshake of TLS."""
MAX_HEADER_BYTES = 64 << 10
"""Size of a request's line and headers, as they are sent."""
MAX_HEADERS = 100
MAX_REQUEST_BYTES = 16 << 20
"""Size of all requests that are being received or answered, headers and bodies, of one server."""
_READ_DEADLINE_S = 30.0
"""Seconds in which a peer must take something of an answer that waits for it."""
_WRITE_BUFFER_BYTES = 16 << 10
# So much of the next request may come with the end of one before it is counted.
_PIECE_BYTES = 16 << 10
# What Python takes for a header besides its bytes.
_HEADER_COST_BYTES = 200


class Holder(Protocol):
    """A connection that holds memory."""

    def end(self, reason: str) -> None:
        """Close the connection at once."""


class Connections:
    """Connections that are open, by peer, and what their requests take. Belongs to the event loop's thread.

    Args:
        max_per_peer: Connections of one address at once; 0 for no bound.
        max_request_bytes: Size of the requests of all connections together.
    """

    def __init__(self, max_per_peer: int, max_request_bytes: int = MAX_REQUEST_BYTES) -> None:
        self._most = max_per_peer
        self._max_request_bytes = max_request_bytes
        self._open: Counter[str] = Counter()
        self._held: dict[Holder, int] = {}
        self._held_bytes = 0
        self._log = RareLog(logger)

    def hold(self, holder: Holder, num_bytes: int) -> None:
        """Record what a connection's request takes now; if all take too much, the largest are ended."""
        self._held_bytes += num_bytes - self._held.get(holder, 0)
        self._held[holder] = num_bytes
        while self._held_bytes > self._max_request_bytes:
            largest = max(self._held, key=self._held.__getitem__)
            self.release(largest)
            largest.end("the requests of all connections are too large, and its was the largest")

    def release(self, holder: Holder) -> None:
        """Forget what a connection's request took."""
        self._held_bytes -= self._held.pop(holder, 0)

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
    """A connection with limits: size and number of headers, requests of all connections, and deadlines.

    Requests are read one by one: a peer that sends the next one before the answer (pipelining) is cut off,
    because one piece of what it sends may hold thousands.
    """

    connections_by_peer: ClassVar[Connections]
    header_deadline_s: ClassVar[float]
    _peer = ""
    _deadline: asyncio.TimerHandle | None = None
    _read_deadline: asyncio.TimerHandle | None = None
    _is_before_body = True
    """Whether the next bytes belong to a request's line and headers, or come before them."""
    _header_bytes = 0
    _body_bytes = 0
    _refusal = ""

    def connection_made(self, transport: Any) -> None:
        """Wait for the first request."""
        self._peer = str((transport.get_extra_info("peername") or ("",))[0])
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._headers_are_here()
        self.resume_writing()
        self.connections_by_peer.release(self)
        self._forget_body()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came piece by piece, each within the limits.

        Most requests bring all of their headers at once, and need no timer.
        """
        self._unset_keepalive_if_required()
        try:
            for begin in range(0, len(data), _PIECE_BYTES):
                if self.transport.is_closing():
                    return
                piece = data[begin : begin + _PIECE_BYTES]
                if self._is_before_body:
                    self._header_bytes += len(piece)
                self.parser.feed_data(piece)
                if self._is_before_body and self._header_bytes > MAX_HEADER_BYTES:
                    self._refuse("its headers are too large")
        except httptools.HttpParserUpgrade:
            pass  # it is served as the request that it also is
        except httptools.HttpParserError:
            self.send_400_response(self._refusal or "it is no HTTP request")
            return
        self._hold()
        if self._is_before_body and self._is_idle():
            self._wait_for_headers()

    def send_400_response(self, msg: str) -> None:
        """Refuse what came, and end the connection."""
        self.connections_by_peer.refuse(self._peer, msg)
        if not self._is_idle():
            self.transport.abort()  # an answer has begun
            return
        status = b"431 Request Header Fields Too Large" if self._refusal else b"400 Bad Request"
        self.transport.write(
            b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status
        )
        self.transport.close()

    def end(self, reason: str) -> None:
        """Close the connection at once."""
        self.connections_by_peer.refuse(self._peer, reason)
        self._forget_body()
        self.transport.abort()

    def on_message_begin(self) -> None:
        """Take in a request."""
        if not self._is_idle():
            self._refuse("it sends requests without waiting for answers")
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take in a header."""
        if len(self.headers) >= MAX_HEADERS:
            self._refuse("it has too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Have what was waited for."""
        self._headers_are_here()
        self._is_before_body = False
        self._body_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take in a part of the body."""
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Have a whole request."""
        super().on_message_complete()
        self._is_before_body = True
        self._header_bytes = 0

    def on_response_complete(self) -> None:
        """Forget the request; what is left of its body is read for a while, and the peer sees the answer."""
        self.connections_by_peer.release(self)
        self._forget_body()
        super().on_response_complete()
        if not self._is_before_body:
            self._wait_for_headers()

    def pause_writing(self) -> None:
        """Wait for the peer to read what it asked for."""
        super().pause_writing()
        self.connections_by_peer.hold(self, self.transport.get_write_buffer_size())
        if self._read_deadline is None:
            self._read_deadline = self.loop.call_later(
                _READ_DEADLINE_S, self.end, "it does not read what it asked for"
            )

    def resume_writing(self) -> None:
        """Go on."""
        if self._read_deadline is not None:
            self._read_deadline.cancel()
            self._read_deadline = None
        super().resume_writing()

    def _is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _forget_body(self) -> None:
        """Drop what the application has not read: it may go on for long after the connection."""
        if self.cycle is not None:
            self.cycle.body = bytearray()

    def _refuse(self, reason: str) -> None:
        """Leave the parser; what came is refused.

        Raises:
            HttpParserError: Always.
        """
        self._refusal = reason
        raise httptools.HttpParserError(reason)

    def _hold(self) -> None:
        """Count what the request takes, unless it is answered already."""
        if self.transport.is_closing():
            return
        if self._is_before_body and self._is_idle():
            held = self._header_bytes + _HEADER_COST_BYTES * len(self.headers or ())
        elif not self._is_idle():
            held = sum(len(name) + len(value) + _HEADER_COST_BYTES for name, value in self.headers)
            held += self._body_bytes
        else:
            return
        self.connections_by_peer.hold(self, held)

    def _wait_for_headers(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(
                self.header_deadline_s, self.end, "no complete request in time"
            )

    def _headers_are_here(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


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
