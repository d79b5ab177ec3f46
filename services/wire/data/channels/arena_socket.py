"""Unix socket through which processes of the same host receive the arena and exchange messages.

The file's mode, 0600, decides who may connect.
"""

import asyncio
import mmap
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from services.common.host import short_path
from services.wire.data.channels.sockets import Frame
from services.wire.data.encoding.codec import MAX_HEADER_BYTES, MAX_READ_BYTES

_PREFIX = struct.Struct("<Iq")
_NO_PAYLOAD = -1
_MAX_QUEUED_BYTES = 64 << 20
"""Max bytes in the send queue; a peer with more does not read its answers."""


class LocalChannel(asyncio.Protocol):
    """One end of a connection.

    Args:
        on_message: Receives the frames of each message in order: the header and at most one
            payload.
        on_end: Called once after the connection has ended; its argument is True if the peer
            exceeded the limits.
    """

    def __init__(
        self, on_message: Callable[[list[memoryview]], None], on_end: Callable[[bool], None]
    ) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._received = bytearray()
        self._is_refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end(self._is_refused)

    def data_received(self, data: bytes) -> None:
        """Passes on complete messages."""
        self._received += data
        while not self._is_refused and (frames := self._next()):
            self._on_message(frames)

    def send(self, frames: Sequence[Frame], *, copy: bool = True) -> None:
        """Sends a message: the header, then its payload in any number of pieces.

        Args:
            copy: Ignored; frames are always copied.
        """
        header, *payload = frames
        size = sum(map(len, payload)) if payload else _NO_PAYLOAD
        prefix = _PREFIX.pack(len(header), size)
        self._transport.write(b"".join((prefix, *frames)))  # type: ignore[arg-type]  # all are buffers
        if self._transport.get_write_buffer_size() > _MAX_QUEUED_BYTES:
            self._transport.abort()

    def close(self) -> None:
        """Ends the connection and drops unsent messages."""
        self._transport.abort()

    def _next(self) -> list[memoryview]:
        if len(self._received) < _PREFIX.size:
            return []
        header_size, payload_size = _PREFIX.unpack_from(self._received)
        if header_size > MAX_HEADER_BYTES or not _NO_PAYLOAD <= payload_size <= MAX_READ_BYTES:
            self._is_refused = True
            self._transport.abort()
            return []
        begin = _PREFIX.size + header_size
        end = begin + max(payload_size, 0)
        if len(self._received) < end:
            return []
        message = memoryview(bytes(self._received[_PREFIX.size : end]))
        del self._received[:end]
        header, payload = message[:header_size], message[header_size:]
        return [header] if payload_size == _NO_PAYLOAD else [header, payload]


_TIMEOUT_S = 2.0
_MAX_NAME_BYTES = 256
# Seconds after the creation of a socket's file in which it may not have a listener yet.
_NEW_S = 60.0


@contextmanager
def serve_arena(
    path: Path, *, instance_id: str, fd: int, accept_client: Callable[[socket.socket], None]
) -> Iterator[None]:
    """Sends ``fd`` to each process that connects, until the block ends.

    Args:
        path: Path of the socket. Sockets that killed processes of this user left in its folder are
            removed.
        instance_id: Sent with ``fd``, so that a client detects a socket of another shard.
    """
    path.unlink(missing_ok=True)
    for socket_path in path.parent.glob(f"slipstream-*{path.suffix}"):
        if _is_left_behind(socket_path):
            socket_path.unlink(missing_ok=True)
    loop = asyncio.get_running_loop()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    old_mask = os.umask(0o177)
    try:
        with short_path(path) as short:
            listener.bind(short)
    finally:
        os.umask(old_mask)
    listener.listen()

    def accept() -> None:
        try:
            peer, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        try:
            socket.send_fds(peer, [instance_id.encode()], [fd])
        except OSError:
            # The peer left; it will use the network or connect again.
            peer.close()
            return
        peer.setblocking(False)
        accept_client(peer)

    loop.add_reader(listener, accept)
    try:
        yield
    finally:
        loop.remove_reader(listener)
        listener.close()
        path.unlink(missing_ok=True)


def open_arena(path: str, *, instance_id: str) -> tuple[mmap.mmap, socket.socket] | None:
    """Connects to a shard of this host.

    Returns:
        Its memory and the connection; None if the shard is on another host or refuses this user.
    """
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fds: list[int] = []
    try:
        peer.settimeout(_TIMEOUT_S)
        with short_path(Path(path)) as short:
            peer.connect(short)
        name, fds, _, _ = socket.recv_fds(peer, _MAX_NAME_BYTES, 1)
        if name.decode(errors="replace") == instance_id and len(fds) == 1:
            memory = mmap.mmap(fds[0], 0)
            peer.setblocking(False)
            return memory, peer
    except OSError:
        # After any error, the caller connects over the network.
        pass
    finally:
        for fd in fds:
            os.close(fd)
    peer.close()
    return None


def _is_left_behind(path: Path) -> bool:
    """Returns True if this user owns the socket, nothing listens there, and it is not just being created."""
    try:
        status = path.lstat()
        is_own = stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid()
        if not is_own or time.time() - status.st_mtime < _NEW_S:
            return False
        with short_path(path) as short, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(_TIMEOUT_S)
            peer.connect(short)
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False
