"""Messages between processes of one host, over a unix socket.

A round trip takes a fifth of the time that it takes through ZeroMQ, whose threads wake each other at both
ends. Each message is a prefix with two lengths, the header, and the payload if there is one.
"""

import asyncio
import struct
from collections.abc import Callable, Sequence
from typing import cast

from services.transferqueue.channels.sockets import Frame
from services.transferqueue.encoding.codec import MAX_HEADER_BYTES, MAX_READ_BYTES

_PREFIX = struct.Struct("<Iq")
_NO_PAYLOAD = -1
_MAX_QUEUED_BYTES = 64 << 20
"""A peer that lets more than this pile up does not read what it asks for."""


class LocalChannel(asyncio.Protocol):
    """One end of a connection.

    Args:
        on_message: Gets the frames of each message in order: the header and at most one payload.
        on_end: Called once when the connection has ended; says whether the peer broke the limits.
    """

    def __init__(
        self, on_message: Callable[[list[memoryview]], None], on_end: Callable[[bool], None]
    ) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._received = bytearray()
        self._is_refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._on_end(self._is_refused)

    def data_received(self, data: bytes) -> None:
        """Hand on the messages that are whole."""
        self._received += data
        while not self._is_refused and (frames := self._next()):
            self._on_message(frames)

    def send(self, frames: Sequence[Frame], *, copy: bool = True) -> None:
        """Send a message: the header, then its payload in any number of pieces.

        Args:
            frames: Header and payload.
            copy: Frames are always copied here.
        """
        header, *payload = frames
        size = sum(map(len, payload)) if payload else _NO_PAYLOAD
        prefix = _PREFIX.pack(len(header), size)
        self._transport.write(b"".join((prefix, *frames)))  # type: ignore[arg-type]  # all are buffers
        if self._transport.get_write_buffer_size() > _MAX_QUEUED_BYTES:
            self._transport.abort()

    def close(self) -> None:
        """End the connection, dropping what was not sent."""
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
