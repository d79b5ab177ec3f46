"""Limits the memory that unknown peers cost gRPC and ZeroMQ servers, which have no such limits.

gRPC's core keeps all header frames of a call until its end, and libzmq allocates a frame before it
knows its peer. Neither has a limit for all connections together, or lets a server accept them
itself. So a thread reads the kernel's count of received bytes for each connection to the port. When
unknown peers have sent too much in total, it shuts down those that sent the most.
"""

import logging
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from services.common.telemetry.logging import RareLog

logger = logging.getLogger(__name__)

MAX_UNKNOWN_BYTES = 24 << 20
"""Max. bytes that all unknown peers of a port may have sent over the open connections."""
MAX_UNKNOWN_CONNECTIONS = 1024
_LOOKS_EVERY_S = 0.005
_QUIET_LOOKS_EVERY_S = 0.05
_KEPT_S = 5.0
# Field tcpi_bytes_received of struct tcp_info (linux/tcp.h).
_BYTES_RECEIVED = struct.Struct("128xQ")


@dataclass(slots=True)
class _Connection:
    fd: int
    inode: int
    peer: str = ""
    """Address in gRPC's format."""
    num_bytes: int = 0


class UnknownPeers:
    """Watches the connections to one TCP port of this process.

    Args:
        max_bytes: Max. bytes that unknown peers may have sent over the open connections.
        max_connections: Max. simultaneous connections of unknown peers; the oldest is shut down
            first.
    """

    def __init__(
        self,
        *,
        max_bytes: int = MAX_UNKNOWN_BYTES,
        max_connections: int = MAX_UNKNOWN_CONNECTIONS,
    ) -> None:
        self._port = 0
        self._max_bytes = max_bytes
        self._max_connections = max_connections
        self._known: dict[str, float] = {}
        self._known_fds: set[int] = set()
        self._found: dict[int, _Connection | None] = {}
        """Sockets of this process by inode; None for those of other ports."""
        self._log = RareLog(logger)
        self._is_over = threading.Event()

    def know(self, peer: str) -> None:
        """Stops watching the connection of an authenticated peer, in gRPC's address format."""
        if peer not in self._known:
            self._known[peer] = time.monotonic()

    def know_fd(self, fd: int) -> None:
        """Does the same as :meth:`know`, by the connection's descriptor in this process."""
        self._known_fds.add(fd)

    @contextmanager
    def watching(self, port: int) -> Iterator[None]:
        """Watches the connections to a port until the block ends."""
        self._port = port
        thread = threading.Thread(target=self._watch, name="unknown-peers", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()

    def _watch(self) -> None:
        wait_s = _QUIET_LOOKS_EVERY_S
        while not self._is_over.wait(wait_s):
            wait_s = _LOOKS_EVERY_S if self.look() else _QUIET_LOOKS_EVERY_S

    def look(self) -> int:
        """Checks once and shuts down connections beyond the limits; returns the number of unknown peers."""
        self._find()
        unknown = [each for each in self._found.values() if each and not self._is_known(each)]
        for each in unknown:
            each.num_bytes = _received(each)
        surplus = unknown[: max(0, len(unknown) - self._max_connections)]
        sent = sum(each.num_bytes for each in unknown)
        if sent > self._max_bytes:
            for each in sorted(unknown, key=lambda each: each.num_bytes, reverse=True):
                surplus.append(each)
                sent -= each.num_bytes
                if sent <= self._max_bytes // 2:
                    break
        for each in surplus:
            self._log.warning("a connection of an unknown peer was ended", peer=each.peer)
            if (own := _duplicate(each)) is not None:
                with own, suppress(OSError):  # the peer is gone
                    own.shutdown(socket.SHUT_RDWR)
        return len(unknown)

    def _is_known(self, connection: _Connection) -> bool:
        return connection.peer in self._known or connection.fd in self._known_fds

    def _find(self) -> None:
        """Adds new connections and drops those that are gone."""
        before, self._found = self._found, {}
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 -- often, and of thousands
            fd = int(name)
            with suppress(OSError):  # closed meanwhile
                status = os.fstat(fd)
                if stat.S_ISSOCK(status.st_mode):
                    inode = status.st_ino
                    known = before[inode] if inode in before else self._connection(fd, inode)
                    self._found[inode] = known
        gone = [each for inode, each in before.items() if each and inode not in self._found]
        self._known_fds.difference_update(each.fd for each in gone)
        open_peers = {each.peer for each in self._found.values() if each}
        forgotten = time.monotonic() - _KEPT_S
        for peer, since in list(self._known.items()):
            if peer not in open_peers and since < forgotten:
                del self._known[peer]

    def _connection(self, fd: int, inode: int) -> _Connection | None:
        connection = _Connection(fd, inode)
        if (own := _duplicate(connection)) is None:
            return None
        with own, suppress(OSError):  # a listening socket has no peer
            if own.family in (socket.AF_INET, socket.AF_INET6):
                connection.peer = _named(*own.getpeername()[:2])
                return connection if own.getsockname()[1] == self._port else None
        return None


def _duplicate(connection: _Connection) -> socket.socket | None:
    """Duplicates the connection's socket; None if its owner has closed it meanwhile."""
    own = -1
    try:
        own = os.dup(connection.fd)
        if os.fstat(own).st_ino == connection.inode:
            return socket.socket(fileno=own)
    except OSError:
        pass
    if own >= 0:
        os.close(own)
    return None


def _received(connection: _Connection) -> int:
    """Returns the bytes received over a connection, as counted by the kernel."""
    with suppress(OSError, struct.error):  # it was closed meanwhile
        # Without a duplicate, as this is frequent: reading the count of another socket by mistake
        # is harmless.
        borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=connection.fd)
        try:
            info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
            return int(_BYTES_RECEIVED.unpack(info)[0])
        finally:
            borrowed.detach()
    return 0


def _named(address: str, port: int) -> str:
    """Formats an address like gRPC: IPv4-mapped IPv6 addresses as IPv4."""
    address = address.removeprefix("::ffff:")
    return f"ipv6:%5B{address}%5D:{port}" if ":" in address else f"ipv4:{address}:{port}"
