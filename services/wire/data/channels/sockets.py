"""ZeroMQ socket on an event loop, without a task or thread per message."""

import asyncio
import ctypes
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from services.wire.data.encoding.codec import FRAME_BYTES, MAX_HEADER_BYTES

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_KEEP_BYTES = 256 << 20
_GROW_BYTES = 16 << 20
_LARGEST_POOLED_BYTES = 32 << 20


def keep_freed_memory() -> None:
    """Keeps up to 256 MiB of freed memory in this process; does nothing without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_POOLED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
        mallopt(_M_TOP_PAD, _GROW_BYTES)


_SEND_BUFFER_BYTES = 128 << 10
"""Size of the kernel's send queue. By default it outgrows the CPU cache, in which the receiver should still
find the bytes.
"""
_SILENCE_MS = 20_000
"""Milliseconds without an answer to a heartbeat, or an acknowledged byte, after which a connection breaks."""
_CONNECT_MS = 2_000
"""Milliseconds after which a connection attempt is repeated, with the name resolved again.

Right after a restart on another host, the name may still mean an address that no longer answers.
"""
_READABLE = int(zmq.POLLIN)
_LAST_FRAME = int(zmq.NOBLOCK)
_FRAME = int(zmq.NOBLOCK | zmq.SNDMORE)
_BURST = 32
"""Max messages that are handled before other work of the loop runs."""

Frame = bytes | memoryview | zmq.Frame
"""Type of a message's frame."""


class MessageSocket:
    """Sends and receives multipart messages.

    Args:
        socket: A connected or bound socket; ``close`` closes it.
        on_message: Receives the frames of each message, in order.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], on_message: Callable[[list[zmq.Frame]], None]
    ) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._receive)
        self._is_due = False
        self._receive_soon()

    def send(self, frames: Sequence[Frame], *, copy: bool = True) -> None:
        """Queues a message.

        Args:
            frames: Its frames; a ``zmq.Frame`` is never copied.
            copy: True if the frames may change after this call. Without a copy they must not change
                until the peer has answered.

        Raises:
            zmq.ZMQError: If the peer is gone or its queue is full.
        """
        for frame in frames[:-1]:
            self._socket.send(frame, _FRAME, copy=copy)
        self._socket.send(frames[-1], _LAST_FRAME, copy=copy)
        # The descriptor is edge-triggered, and sending may have consumed the edge of an arrival.
        self._receive_soon()

    def close(self) -> None:
        if not self._socket.closed:  # or another socket may have the descriptor
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=0)

    def _receive_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        self._is_due = False
        if self._socket.closed:
            return
        for _ in range(_BURST):
            if not int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE:
                return
            frames = [self._socket.recv(_LAST_FRAME, copy=False)]
            while frames[-1].more:
                frames.append(self._socket.recv(_LAST_FRAME, copy=False))
            self._on_message(frames)
        self._receive_soon()


_CONNECTED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_LOST = int(
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ClientSocket(MessageSocket):
    """Message socket of a client, which reports when it is connected and when its connection is lost.

    ZeroMQ connects again by itself, but answers to earlier requests never arrive then.

    Args:
        socket: A socket that is not connected yet.
        on_connected: Called when the peer has admitted this client.
        on_lost: Called when the connection breaks, or the peer refuses it.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_message: Callable[[list[zmq.Frame]], None],
        *,
        on_connected: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        super().__init__(socket, on_message)
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._events = MessageSocket(socket.get_monitor_socket(_CONNECTED | _LOST), self._on_event)

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._events.close()
        super().close()

    def _on_event(self, frames: list[zmq.Frame]) -> None:
        event = parse_monitor_message([frame.bytes for frame in frames])["event"]
        if event == _CONNECTED:
            self._on_connected()
        elif event & _LOST:
            self._on_lost()


def set_limits(socket: zmq.Socket[bytes], *, receive_queue: int) -> None:
    """Sets the limits and time-outs of a socket, which apply before memory is allocated for a message."""
    socket.setsockopt(zmq.MAXMSGSIZE, max(2 * FRAME_BYTES, MAX_HEADER_BYTES))
    socket.setsockopt(zmq.RCVHWM, receive_queue)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDBUF, _SEND_BUFFER_BYTES)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
    # ZeroMQ sends no heartbeat while the kernel's send queue is full. Acknowledged bytes then show that the
    # peer is alive, even over a slow link.
    socket.setsockopt(zmq.TCP_MAXRT, _SILENCE_MS)
