"""Messages between processes of one host, over a Unix socket.

A round trip takes a fifth of its time through ZeroMQ, whose threads wake each other at both ends.
Each message is a prefix with two lengths, the header, and the payload if there is one.
"""

import asyncio
import struct
from collections.abc import Callable, Sequence
from typing import cast

from services.wire.data.channels.sockets import Frame
from services.wire.data.encoding.codec import MAX_HEADER_BYTES, MAX_READ_BYTES

_PREFIX = struct.Struct("<Iq")
_NO_PAYLOAD = -1
_MAX_QUEUED_BYTES = 64 << 20
"""Max. bytes in the send queue; a peer with more does not read its answers."""


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
        """Stores the transport of the new connection."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Reports the end of the connection."""
        self._on_end(self._is_refused)

    def data_received(self, data: bytes) -> None:
        """Passes on complete messages."""
        self._received += data
        while not self._is_refused and (frames := self._next()):
            self._on_message(frames)

    def send(self, frames: Sequence[Frame], *, copy: bool = True) -> None:
        """Sends a message: the header, then its payload in any number of pieces.

        Args:
            frames: Header and payload.
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
