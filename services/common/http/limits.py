"""Limits the descriptors, memory and time that connections cost an HTTP server.

A request's line and headers have at most 64 KiB and 100 fields. The total size of all requests in
progress is limited: the server ends the largest request first, so that large requests do not prevent
small ones. Deadlines end slow connections. The number of connections whose peer has not authenticated
is limited: the server ends the oldest first. A body is read only as fast as the application takes it,
so an application that authenticates first holds no body of an unauthenticated peer.
"""

import asyncio
import logging
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Protocol

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.common.telemetry.logging import PERIOD_S, RareLog

logger = logging.getLogger(__name__)

HEADER_DEADLINE_S = 10.0
"""Max seconds from the connection, or from the first byte of a further request, to the end of the
headers; the TLS handshake before has the same deadline.
"""
MAX_HEADER_BYTES = 64 << 10
"""Max size of a request's line, headers, and framing of the body (chunks, trailers), as sent."""
MAX_HEADERS = 100
MAX_REQUEST_BYTES = 16 << 20
"""Max size of all requests in progress of one server, headers and bodies."""
MAX_UNAUTHENTICATED = 256
"""Max connections of a server whose peers have not authenticated; a further connection closes the oldest."""
MAX_UNAUTHENTICATED_EPISODES = 4096
"""The same limit for servers of episodes: many agents connect at once, and send their requests later."""
_READ_DEADLINE_S = 30.0
"""Seconds within which a peer must read some of a waiting response."""
_LINGER_S = 1.0
"""Seconds in which the rest of a request is dropped after its response, before the connection closes."""
_WRITE_BUFFER_BYTES = 16 << 10
# Up to this much of a body is read before the application takes it, and up to this much of the next
# request may arrive with the end of one before it is counted.
_PIECE_BYTES = 16 << 10
_BODY_PIECE_BYTES = 64 << 10
_ADMISSION = "slipstream.admission"
# Python's memory for a header besides its bytes.
_HEADER_COST_BYTES = 200


def admit(scope: Scope) -> None:
    """Exempts the connection of an authenticated request from the limit on unauthenticated connections.

    Args:
        scope: The request's ASGI scope; nothing happens if another server made it.
    """
    if (admission := scope.get("extensions", {}).get(_ADMISSION)) is not None:
        admission["admit"]()


class Holder(Protocol):
    """Connection that holds memory."""

    def end(self, reason: str) -> None:
        """Closes the connection at once."""


class Connections:
    """Open connections by peer, and the size of their requests. Use only in the event loop's thread.

    Args:
        max_per_peer: Max simultaneous connections of one address; 0 for no limit.
        max_request_bytes: Max total size of the requests of all connections.
        authenticates: False if peers need not authenticate, so that none counts as unauthenticated.
        max_unauthenticated: Max connections whose peer has not authenticated.
    """

    def __init__(
        self,
        max_per_peer: int,
        max_request_bytes: int = MAX_REQUEST_BYTES,
        *,
        authenticates: bool = True,
        max_unauthenticated: int = MAX_UNAUTHENTICATED,
    ) -> None:
        self._max_per_peer = max_per_peer
        self._max_unauthenticated = max_unauthenticated
        self._authenticates = authenticates
        self._max_request_bytes = max_request_bytes
        self._open: Counter[str] = Counter()
        self._unauthenticated: dict[int, _Counted] = {}
        """Sockets whose peer has not authenticated, by descriptor, the oldest first."""
        self._bytes_by_holder: dict[Holder, int] = {}
        self._held_bytes = 0
        self._log = RareLog(logger)

    def record_size(self, holder: Holder, num_bytes: int) -> None:
        """Records the current size of a connection's request; ends the largest requests beyond the limit."""
        self._held_bytes += num_bytes - self._bytes_by_holder.get(holder, 0)
        self._bytes_by_holder[holder] = num_bytes
        while self._held_bytes > self._max_request_bytes:
            largest = max(self._bytes_by_holder, key=self._bytes_by_holder.__getitem__)
            self.release(largest)
            largest.end(
                "all requests together exceed the memory limit, and this one was the largest"
            )

    def release(self, holder: Holder) -> None:
        """Drops the size of a connection's request."""
        self._held_bytes -= self._bytes_by_holder.pop(holder, 0)

    def add(self, connection: "_Counted") -> bool:
        """Counts a connection; returns False if its peer has reached the limit."""
        peer = connection.peer
        if 0 < self._max_per_peer <= self._open[peer]:
            self.refuse(peer, "too many connections")
            return False
        self._open[peer] += 1
        if not self._authenticates:
            return True
        self._unauthenticated[connection.fileno()] = connection
        if len(self._unauthenticated) > self._max_unauthenticated:
            oldest = next(iter(self._unauthenticated.values()))
            self.admit(oldest)
            oldest.end("too many others did not authenticate either")
        return True

    def admit(self, connection: "_Counted") -> None:
        """Exempts a connection from the limit on those whose peer has not authenticated."""
        if self._unauthenticated.get(connection.fileno()) is connection:
            del self._unauthenticated[connection.fileno()]

    def unauthenticated(self, descriptor: int) -> "_Counted | None":
        """Returns the connection of a descriptor, unless it was admitted or ended."""
        return self._unauthenticated.get(descriptor)

    def remove(self, connection: "_Counted") -> None:
        """Stops counting a connection, which is about to close."""
        self.admit(connection)
        self._open[connection.peer] -= 1
        if not self._open[connection.peer]:
            del self._open[connection.peer]

    def refuse(self, peer: str, reason: str) -> None:
        """Logs that a connection was ended."""
        self._log.warning("closed a connection", peer=peer, reason=reason)


class CountedListener(socket.socket):
    """Accepts connections that are counted until they close, including those in a handshake."""

    connections: Connections

    def listen(self, backlog: int = 0) -> None:
        """Does nothing: the socket already listens, with its own length of the kernel's queue."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Accepts a connection.

        Raises:
            ConnectionAbortedError: If its peer has reached the limit; the connection is closed.
        """
        accepted, address = super().accept()
        connection = _Counted(accepted.family, accepted.type, accepted.proto, accepted.detach())
        # Local processes that connect over a Unix socket have no address.
        connection.peer = str(address[0]) if address else ""
        if not self.connections.add(connection):
            connection.close()
            raise ConnectionAbortedError
        connection.connections = self.connections
        return connection, address


class _Counted(socket.socket):
    connections: Connections | None = None
    peer = ""
    on_end: Callable[[str], None] | None = None
    """Ends the HTTP connection; None before it begins, as in a TLS handshake."""

    def end(self, reason: str) -> None:
        if self.on_end is not None:
            self.on_end(reason)
        else:
            with suppress(OSError):  # the peer has ended it
                self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.on_end = None
        if self.connections is not None:
            connections, self.connections = self.connections, None
            connections.remove(self)
        super().close()


def counted(listener: socket.socket, connections: Connections) -> CountedListener:
    """Converts a listening socket to one whose connections are counted."""
    socket_arguments = listener.family, listener.type, listener.proto
    counted_listener = CountedListener(*socket_arguments, listener.detach())
    counted_listener.connections = connections
    return counted_listener


class LimitedProtocol(HttpToolsProtocol, asyncio.BufferedProtocol):
    """HTTP connection with limits on headers, on requests of all connections, and with deadlines.

    Requests are read one by one: a peer that sends the next one before the response (pipelining) is
    disconnected, because one chunk of its data may hold thousands.
    """

    connections_by_peer: ClassVar[Connections]
    header_deadline_s: ClassVar[float]
    _received: ClassVar[memoryview] = memoryview(bytearray(_BODY_PIECE_BYTES))
    """Receive buffer that all connections share: data is copied from it and parsed right after each read."""
    _peer = ""
    _counted: _Counted | None = None
    _deadline: asyncio.TimerHandle | None = None
    _read_deadline: asyncio.TimerHandle | None = None
    _is_before_body = True
    """True if the next bytes belong to a request's line and headers, or precede them."""
    _header_bytes = 0
    _body_bytes = 0
    _refusal = ""
    _is_lingering = False
    """True if all further data is dropped."""

    def connection_made(self, transport: Any) -> None:
        """Starts the deadline of the first request."""
        self._peer = str((transport.get_extra_info("peername") or ("",))[0])
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        descriptor = transport.get_extra_info("socket").fileno()
        self._counted = self.connections_by_peer.unauthenticated(descriptor)
        if self._counted is not None:
            self._counted.on_end = self.end
        self._start_header_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels deadlines and releases the request's memory."""
        self._stop_header_deadline()
        self.resume_writing()
        self.connections_by_peer.release(self)
        self._drop_request()
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns where to receive the next piece of data."""
        # After the first piece of a body, reading continues because the application took it.
        has_begun = not self._is_before_body and self._body_bytes > 0
        return self._received if has_begun else self._received[:_PIECE_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """Parses a piece of data."""
        self.data_received(bytes(self._received[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Parses a piece of data within the limits.

        Most requests arrive with all of their headers at once, and need no timer.
        """
        self._unset_keepalive_if_required()
        if self.transport.is_closing() or self._is_lingering:
            return
        try:
            self._header_bytes += len(data)
            self.parser.feed_data(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse("headers are too large")
        except httptools.HttpParserUpgrade:
            pass  # served as an ordinary request, which it also is
        except httptools.HttpParserError:
            self.send_400_response(self._refusal or "not an HTTP request")
            return
        self._hold()
        if self._is_before_body and self._is_idle():
            self._start_header_deadline()
        elif not self._is_before_body and not self._is_idle() and self.cycle.body:
            self.flow.pause_reading()  # until the application takes it

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
        self._linger()

    def close_after_response(self) -> None:
        """Closes the connection, at once if its request was read completely."""
        if self._is_before_body:
            self.transport.close()
        else:
            self._linger()

    def _linger(self) -> None:
        """Closes the connection when the peer has had time to read the response.

        The kernel resets a connection that is closed with unread data, and the peer may lose the response.
        """
        self._is_lingering = True
        self._drop_request()
        if self.transport.can_write_eof():  # not with TLS
            self.transport.write_eof()
        self._stop_header_deadline()
        self._deadline = self.loop.call_later(_LINGER_S, self.transport.close)

    def end(self, reason: str) -> None:
        """Closes the connection at once."""
        self.connections_by_peer.refuse(self._peer, reason)
        # The event loop calls connection_lost only after it has read from all other connections.
        self._drop_request()
        self.transport.abort()

    def on_message_begin(self) -> None:
        """Starts a request; rejects pipelining."""
        if not self._is_idle():
            self._refuse("HTTP pipelining is not supported")
        super().on_message_begin()
        if self._counted is not None:
            admission: dict[object, object] = {
                "admit": partial(self.connections_by_peer.admit, self._counted)
            }
            self.scope["extensions"] = {_ADMISSION: admission}

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MAX_HEADERS:
            self._refuse("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Cancels the header deadline."""
        self._stop_header_deadline()
        self._is_before_body = False
        self._body_bytes = 0
        super().on_headers_complete()
        self.cycle.transport = _ResponseTransport(self)  # type: ignore[assignment]  # has its methods

    def on_body(self, body: bytes) -> None:
        """Counts a part of the body; ``_header_bytes`` keeps its framing: chunk sizes and trailers."""
        self._body_bytes += len(body)
        self._header_bytes -= len(body)
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
        if not self._is_before_body and not self._is_lingering:
            self._start_header_deadline()

    def pause_writing(self) -> None:
        """Starts the deadline within which the peer must read the response."""
        super().pause_writing()
        self.connections_by_peer.record_size(self, self.transport.get_write_buffer_size())
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
        """Returns True if no response is in progress."""
        return self.cycle is None or self.cycle.response_complete

    def _drop_body(self) -> None:
        """Drops the unread body, because the application may run long after the connection has ended."""
        if self.cycle is not None:
            self.cycle.body = bytearray()

    def _drop_request(self) -> None:
        self._drop_body()
        self.parser = None  # type: ignore[assignment]
        self.headers = []

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
            size = self._header_bytes + _HEADER_COST_BYTES * len(self.headers or ())
        elif not self._is_idle():
            size = sum(len(name) + len(value) + _HEADER_COST_BYTES for name, value in self.headers)
            size += self._body_bytes
        else:
            return
        self.connections_by_peer.record_size(self, size)

    def _start_header_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(
                self.header_deadline_s, self.end, "no complete request before the deadline"
            )

    def _stop_header_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _ResponseTransport:
    """Transport of a response; closes it by :meth:`LimitedProtocol.close_after_response`."""

    def __init__(self, protocol: LimitedProtocol) -> None:
        self._protocol = protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol.transport, name)

    def close(self) -> None:
        self._protocol.close_after_response()


def limited(connections: Connections, header_deadline_s: float) -> type[asyncio.Protocol]:
    """Returns a protocol class with the given limits."""
    attributes = {"connections_by_peer": connections, "header_deadline_s": header_deadline_s}
    return type("Limited", (LimitedProtocol,), attributes)


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
        if not str(record.msg).startswith("socket.accept()"):
            return True
        now = time.monotonic()
        if now - self._logged_at < PERIOD_S:
            return False
        self._logged_at = now
        return True
