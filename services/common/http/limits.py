"""Limits the descriptors, memory and time that connections cost an HTTP server.

A request's line and headers have at most 64 KiB and 100 fields. Requests in progress have a limit
for all connections together: the largest is ended first, so that a small one is served regardless
of large ones. Deadlines end slow connections.
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
"""Max. seconds from the connection, or from the first byte of a further request, to the end of the
headers; the TLS handshake before has the same deadline.
"""
MAX_HEADER_BYTES = 64 << 10
"""Max. size of a request's line and headers, as sent."""
MAX_HEADERS = 100
MAX_REQUEST_BYTES = 16 << 20
"""Max. size of all requests in progress of one server, headers and bodies."""
_READ_DEADLINE_S = 30.0
"""Seconds within which a peer must read some of a waiting response."""
_WRITE_BUFFER_BYTES = 16 << 10
# Up to this much of the next request may arrive with the end of one before it is counted.
_PIECE_BYTES = 16 << 10
# Python's memory for a header besides its bytes.
_HEADER_COST_BYTES = 200


class Holder(Protocol):
    """Connection that holds memory."""

    def end(self, reason: str) -> None:
        """Closes the connection at once."""


class Connections:
    """Open connections by peer, and the size of their requests. Use only in the event loop's thread.

    Args:
        max_per_peer: Max. simultaneous connections of one address; 0 for no limit.
        max_request_bytes: Max. total size of the requests of all connections.
    """

    def __init__(self, max_per_peer: int, max_request_bytes: int = MAX_REQUEST_BYTES) -> None:
        self._max_per_peer = max_per_peer
        self._max_request_bytes = max_request_bytes
        self._open: Counter[str] = Counter()
        self._held: dict[Holder, int] = {}
        self._held_bytes = 0
        self._log = RareLog(logger)

    def hold(self, holder: Holder, num_bytes: int) -> None:
        """Records the current size of a connection's request; ends the largest requests beyond the limit."""
        self._held_bytes += num_bytes - self._held.get(holder, 0)
        self._held[holder] = num_bytes
        while self._held_bytes > self._max_request_bytes:
            largest = max(self._held, key=self._held.__getitem__)
            self.release(largest)
            largest.end(
                "all requests together exceed the memory limit, and this one was the largest"
            )

    def release(self, holder: Holder) -> None:
        """Drops the size of a connection's request."""
        self._held_bytes -= self._held.pop(holder, 0)

    def open(self, peer: str) -> bool:
        """Counts a connection; returns False if its peer has reached the limit."""
        if 0 < self._max_per_peer <= self._open[peer]:
            self.refuse(peer, "too many connections")
            return False
        self._open[peer] += 1
        return True

    def close(self, peer: str) -> None:
        """Stops counting a connection."""
        self._open[peer] -= 1
        if not self._open[peer]:
            del self._open[peer]

    def refuse(self, peer: str, reason: str) -> None:
        """Logs that a connection was ended."""
        self._log.warning("closed a connection", peer=peer, reason=reason)


class CountedListener(socket.socket):
    """Accepts connections that are counted until they close, including those in a handshake."""

    connections: Connections

    def accept(self) -> tuple[socket.socket, Any]:
        """Accepts a connection.

        Raises:
            ConnectionAbortedError: If its peer has reached the limit; the connection is closed.
        """
        accepted, address = super().accept()
        counted = _Counted(accepted.family, accepted.type, accepted.proto, accepted.detach())
        # Local processes that connect over a Unix socket have no address.
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
    """Converts a listening socket to one whose connections are counted."""
    parts = listener.family, listener.type, listener.proto
    made = CountedListener(*parts, listener.detach())
    made.connections = connections
    return made


class LimitedProtocol(HttpToolsProtocol):
    """HTTP connection with limits on headers, on requests of all connections, and with deadlines.

    Requests are read one by one: a peer that sends the next one before the response (pipelining) is
    disconnected, because one chunk of its data may hold thousands.
    """

    connections_by_peer: ClassVar[Connections]
    header_deadline_s: ClassVar[float]
    _peer = ""
    _deadline: asyncio.TimerHandle | None = None
    _read_deadline: asyncio.TimerHandle | None = None
    _is_before_body = True
    """True if the next bytes belong to a request's line and headers, or precede them."""
    _header_bytes = 0
    _body_bytes = 0
    _refusal = ""

    def connection_made(self, transport: Any) -> None:
        """Starts the deadline of the first request."""
        self._peer = str((transport.get_extra_info("peername") or ("",))[0])
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        self._start_header_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels deadlines and releases the request's memory."""
        self._stop_header_deadline()
        self.resume_writing()
        self.connections_by_peer.release(self)
        self._drop_body()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses data piece by piece, each within the limits.

        Most requests arrive with all of their headers at once, and need no timer.
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
                    self._refuse("headers are too large")
        except httptools.HttpParserUpgrade:
            pass  # served as an ordinary request, which it also is
        except httptools.HttpParserError:
            self.send_400_response(self._refusal or "not an HTTP request")
            return
        self._hold()
        if self._is_before_body and self._is_idle():
            self._start_header_deadline()

    def send_400_response(self, msg: str) -> None:
        """Rejects the data and closes the connection."""
        self.connections_by_peer.refuse(self._peer, msg)
        if not self._is_idle():
            self.transport.abort()  # a response has begun
            return
        status = b"431 Request Header Fields Too Large" if self._refusal else b"400 Bad Request"
        self.transport.write(
            b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status
        )
        self.transport.close()

    def end(self, reason: str) -> None:
        """Closes the connection at once."""
        self.connections_by_peer.refuse(self._peer, reason)
        self._drop_body()
        self.transport.abort()

    def on_message_begin(self) -> None:
        """Starts a request; rejects pipelining."""
        if not self._is_idle():
            self._refuse("HTTP pipelining is not supported")
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Adds a header, up to the limit."""
        if len(self.headers) >= MAX_HEADERS:
            self._refuse("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Cancels the header deadline."""
        self._stop_header_deadline()
        self._is_before_body = False
        self._body_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Counts a part of the body."""
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends the body of a request."""
        super().on_message_complete()
        self._is_before_body = True
        self._header_bytes = 0

    def on_response_complete(self) -> None:
        """Releases the request; reads the rest of its body for a while so that the peer sees the response."""
        self.connections_by_peer.release(self)
        self._drop_body()
        super().on_response_complete()
        if not self._is_before_body:
            self._start_header_deadline()

    def pause_writing(self) -> None:
        """Starts the deadline within which the peer must read the response."""
        super().pause_writing()
        self.connections_by_peer.hold(self, self.transport.get_write_buffer_size())
        if self._read_deadline is None:
            self._read_deadline = self.loop.call_later(
                _READ_DEADLINE_S, self.end, "the peer did not read the response in time"
            )

    def resume_writing(self) -> None:
        """Cancels the read deadline."""
        if self._read_deadline is not None:
            self._read_deadline.cancel()
            self._read_deadline = None
        super().resume_writing()

    def _is_idle(self) -> bool:
        """Returns whether no response is in progress."""
        return self.cycle is None or self.cycle.response_complete

    def _drop_body(self) -> None:
        """Drops the unread body: the application may outlive the connection for long."""
        if self.cycle is not None:
            self.cycle.body = bytearray()

    def _refuse(self, reason: str) -> None:
        """Stops the parser to reject the data.

        Raises:
            HttpParserError: Always.
        """
        self._refusal = reason
        raise httptools.HttpParserError(reason)

    def _hold(self) -> None:
        """Records the size of the request, unless it is already answered."""
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

    def _start_header_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(
                self.header_deadline_s, self.end, "no complete request before the deadline"
            )

    def _stop_header_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def limited(connections: Connections, header_deadline_s: float) -> type[asyncio.Protocol]:
    """Returns a protocol class with the given limits."""
    given = {"connections_by_peer": connections, "header_deadline_s": header_deadline_s}
    return type("Limited", (LimitedProtocol,), given)


def raise_descriptor_limit() -> int:
    """Raises the limit of open files of this process to its maximum; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 20


class OncePerMinute(logging.Filter):
    """Log filter that passes asyncio's failures to accept connections once a minute."""

    _logged_at: float = -PERIOD_S

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether a record is logged."""
        if not str(record.msg).startswith("socket.accept()"):
            return True
        now = time.monotonic()
        if now - self._logged_at < PERIOD_S:
            return False
        self._logged_at = now
        return True
