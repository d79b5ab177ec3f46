"""Accepts the connections of a gRPC or ZeroMQ server, and limits each until its peer has authenticated.

gRPC's core keeps the header frames of a call without limit, libzmq allocates a frame before it knows its
peer, and neither accepts a connection that other code has accepted. So the server listens on a Unix socket
that only this process can reach, and this module forwards connections to it. A connection whose peer has not
authenticated has limits on its bytes and its time, and the number of such connections is limited. The kernel
moves the data (splice), so this process never copies the data of an authenticated peer.
"""

import asyncio
import fcntl
import logging
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from services.common.errors import InvalidArgumentError
from services.common.host import short_path
from services.common.telemetry.logging import RareLog

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
"""Max connections whose peer has not authenticated; one more closes the oldest."""
DEADLINE_S = 10.0
"""Max seconds until the peer of a connection has authenticated."""
_MOVED_BYTES = 1 << 20
_FIRST_BYTES = 8 << 10
"""Max bytes of one read from a client that is not admitted: the server may refuse it between two reads."""
MAX_REFUSALS = 8
"""Max refused calls of a connection before it is closed."""
_ANSWER_S = 0.5
"""Seconds in which a refused client may read the answer."""
_SHOWN_BYTES = 1024
_RETRY_S = 0.1


@contextmanager
def private_socket(listen_at: Callable[[str], object]) -> Iterator[str]:
    """Lets a server listen on a Unix socket whose file is removed; yields a path for this process alone.

    Args:
        listen_at: Starts listening at the given path, which is removed after the call.
    """
    with (
        tempfile.TemporaryDirectory(prefix="slipstream-") as folder,
        short_path(Path(folder) / "socket") as path,
    ):
        listen_at(path)
        # The descriptor refers to the socket after the folder is removed. If the folder stayed, a process
        # that is killed would leave it behind.
        descriptor = os.open(path, os.O_PATH)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


class AdmissionProxy:
    """Forwards the connections of a TCP port to a Unix socket; use it in the event loop's thread.

    Args:
        max_bytes: Max bytes that are read from each connection that is not admitted. After them, the
            connection may wait for its admission or for the server's refusal.
        admitting: Bytes that the server sends at the beginning of a connection if it has authenticated
            the peer, and only then. Empty if the server calls :meth:`admit` instead.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        max_connections: int = MAX_CONNECTIONS,
        deadline_s: float = DEADLINE_S,
        admitting: bytes = b"",
    ) -> None:
        self.max_bytes = max_bytes
        self.admitting = admitting
        self.target = ""
        self._max_connections = max_connections
        self._deadline_s = deadline_s
        self._open: dict[str, _Connection] = {}
        """Connections by the address that the server sees."""
        self._pending: dict[_Connection, asyncio.TimerHandle] = {}
        """Connections that are not admitted, the oldest first, with their deadlines."""
        self._log = RareLog(logger)

    @asynccontextmanager
    async def serve(self, bind: str, target: str) -> AsyncIterator[int]:
        """Accepts connections until the block ends, then closes them; yields the port.

        Args:
            bind: Address as for :func:`listen`.

        Raises:
            InvalidArgumentError: If the address cannot be bound.
        """
        self.target = target
        self._loop = asyncio.get_running_loop()
        with listen(bind) as listener:
            listener.setblocking(False)
            self._loop.add_reader(listener, self._accept, listener)
            try:
                yield listener.getsockname()[1]
            finally:
                self._loop.remove_reader(listener)
                for connection in {*self._open.values(), *self._pending}:
                    connection.close()

    def admit(self, address: str) -> None:
        """Lifts the limits of an authenticated peer's connection.

        Args:
            address: The peer's address as the server sees it.
        """
        if (connection := self._open.get(address)) is not None and not connection.is_admitted:
            self._pending.pop(connection).cancel()
            connection.admit()

    def refuse(self, address: str) -> None:
        """Counts a refused call; at ``MAX_REFUSALS``, closes the connection after the last answer.

        Args:
            address: The peer's address as the server sees it.
        """
        connection = self._open.get(address)
        if connection is not None and not connection.is_admitted:
            connection.num_refusals += 1
            if connection.num_refusals == MAX_REFUSALS:
                connection.stop_reading()
                self._pending[connection].cancel()
                self._pending[connection] = self._loop.call_later(_ANSWER_S, connection.close)

    def add(self, connection: "_Connection") -> None:
        self._open[connection.address] = connection

    def close_connection(self, connection: "_Connection", reason: str) -> None:
        self._log.warning("closed a connection", peer=connection.peer, reason=reason)
        connection.close()

    def remove(self, connection: "_Connection") -> None:
        self._open.pop(connection.address, None)
        if (deadline := self._pending.pop(connection, None)) is not None:
            deadline.cancel()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(self._max_connections):
            try:
                client, address = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                # No file descriptors are left: close the connections that are not admitted to free theirs.
                self._log.warning("a connection was not accepted", error=str(error))
                for connection in [*self._pending]:
                    connection.close()
                self._loop.remove_reader(listener)
                self._loop.call_later(_RETRY_S, self._resume, listener)
                return
            connection = _Connection(self, client, peer=str(address[0]))
            self._pending[connection] = self._loop.call_later(
                self._deadline_s,
                self.close_connection,
                connection,
                "it did not authenticate in time",
            )
            if len(self._pending) > self._max_connections:
                oldest = next(iter(self._pending))
                self.close_connection(oldest, "too many others did not authenticate either")

    def _resume(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self._loop.add_reader(listener, self._accept, listener)


class _Connection:
    """A client's connection and its connection to the server, which opens at the client's first bytes.

    Args:
        peer: The client's address, for the log.
    """

    def __init__(self, proxy: AdmissionProxy, client: socket.socket, *, peer: str) -> None:
        self.peer = peer
        self.address = ""
        self.is_admitted = False
        self.num_refusals = 0
        self._proxy = proxy
        self._client = client
        self._flows: tuple[_Flow, ...] = ()
        self._allowed_bytes = proxy.max_bytes
        self._server: socket.socket | None = None
        self._loop = asyncio.get_running_loop()
        client.setblocking(False)
        self._loop.add_reader(client, self._connect)

    def _connect(self) -> None:
        self._loop.remove_reader(self._client)
        server = self._server = socket.socket(socket.AF_UNIX)
        server.setblocking(False)
        try:
            server.bind("")  # the kernel chooses an abstract address
            server.connect(self._proxy.target)
            self._flows = (
                _Flow(self._client, server, self._allow, self._count, self.close),
                _Flow(server, self._client, self._look, lambda num_bytes: None, self.close),
            )
        except OSError:  # the server ends, its queue is full, or no descriptors are left
            self.close()
            return
        self.address = f"unix-abstract:{server.getsockname()[1:].decode()}"
        self._proxy.add(self)
        for flow in self._flows:
            flow.resume()

    def admit(self) -> None:
        self.is_admitted = True
        for flow in self._flows:
            flow.widen()
        if not self._allowed_bytes:
            self._flows[0].resume()

    def stop_reading(self) -> None:
        """Stops reading from the client."""
        self._allowed_bytes = 0

    def _allow(self) -> int:
        return _MOVED_BYTES if self.is_admitted else min(self._allowed_bytes, _FIRST_BYTES)

    def _count(self, num_bytes: int) -> None:
        if not self.is_admitted:
            self._allowed_bytes = max(0, self._allowed_bytes - num_bytes)

    def _look(self) -> int:
        """Peeks at the server's next data for the admitting bytes; returns how many bytes may be read."""
        if not self.is_admitted and self._proxy.admitting and self._server is not None:
            try:
                first_bytes = self._server.recv(_SHOWN_BYTES, socket.MSG_PEEK)
            except OSError:  # no data, or a broken connection, which the next splice reports
                return _MOVED_BYTES
            if self._proxy.admitting in first_bytes:
                self._proxy.admit(self.address)
        return _MOVED_BYTES

    def close(self) -> None:
        self._proxy.remove(self)
        self._loop.remove_reader(self._client)
        for flow in self._flows:
            flow.close()
        self._client.close()
        if self._server is not None:
            self._server.close()


class _Flow:
    """Moves data in one direction. It sends all data that it has read before it reads again.

    Args:
        allow: Returns how many bytes may be read next; 0 stops reading until :meth:`resume`.
        count: Called with the number of bytes of each read.
        end: Called at the end of the data, or if either connection breaks.
    """

    def __init__(
        self,
        source: socket.socket,
        sink: socket.socket,
        allow: Callable[[], int],
        count: Callable[[int], None],
        end: Callable[[], None],
    ) -> None:
        self._source = source
        self._sink = sink
        self._allow = allow
        self._count = count
        self._end = end
        self._waiting = 0
        self._loop = asyncio.get_running_loop()
        self._reading, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_open = True

    def resume(self) -> None:
        """Reads from the source as soon as it has data, unless data still waits to be sent."""
        if self._is_open and not self._waiting:
            self._loop.add_reader(self._source, self._read)

    def widen(self) -> None:
        """Enlarges the pipe, unless this user's pipes already have the max. memory that the kernel allows."""
        with suppress(OSError):
            fcntl.fcntl(self._writing, fcntl.F_SETPIPE_SZ, _MOVED_BYTES)

    def close(self) -> None:
        """Stops; drops data that was read and not sent."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._source)
            self._loop.remove_writer(self._sink)
            os.close(self._reading)
            os.close(self._writing)

    def _read(self) -> None:
        allowed = self._allow()
        if not allowed:
            self._loop.remove_reader(self._source)
            return
        try:
            num_bytes = os.splice(
                self._source.fileno(), self._writing, allowed, flags=os.SPLICE_F_NONBLOCK
            )
        except BlockingIOError:
            return
        except OSError:
            self._end()
            return
        if not num_bytes:
            self._end()
            return
        self._count(num_bytes)
        self._waiting += num_bytes
        self._send()

    def _send(self) -> None:
        if not self._is_open:
            return
        try:
            self._waiting -= os.splice(
                self._reading, self._sink.fileno(), self._waiting, flags=os.SPLICE_F_NONBLOCK
            )
        except BlockingIOError:
            pass
        except OSError:
            self._end()
            return
        if self._waiting:
            self._loop.remove_reader(self._source)
            self._loop.add_writer(self._sink, self._send)
        elif self._loop.remove_writer(self._sink):
            self.resume()


_BACKLOG = 1024


def listen(bind: str) -> socket.socket:
    """Returns a listening socket whose connections send data without delay (TCP_NODELAY).

    Args:
        bind: ``host:port``, where port 0 chooses a free one, or ``unix:PATH``. An IPv6 address is in
            brackets; ``[::]`` accepts IPv4, too.

    Raises:
        InvalidArgumentError: If the address cannot be bound.
    """
    host, _, port = bind.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        if host == "unix":
            # For local processes that may open its file.
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(port)
            listener.listen(_BACKLOG)
            return listener
        listener = socket.create_server(
            (host, int(port)),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
            backlog=_BACKLOG,
            reuse_port=False,
        )
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"cannot listen on {bind}: {getattr(error, 'strerror', None) or error}; expected host:port "
            "with an address of this host: choose another port, or 0 for any free one",
            bind=bind,
        ) from error
    # Accepted connections inherit the option. Without it, a response body waits 40 ms for the client's
    # acknowledgement of the headers.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
