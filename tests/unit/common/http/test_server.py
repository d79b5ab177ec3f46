"""Tests of the HTTP server: TLS, and limits on connections, headers and bodies."""

import asyncio
import socket
import ssl
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from services.common.admission import listen
from services.common.http import limits
from services.common.http.server import serve_http
from tests.helpers.pki import make_authority

APP = Starlette(routes=[Route("/", lambda request: PlainTextResponse("here"))])


async def fetch(port: int, authority) -> str:
    trusted = ssl.create_default_context(cafile=authority.folder / "ca.crt")
    async with httpx.AsyncClient(verify=trusted, trust_env=False) as client:
        return (await client.get(f"https://localhost:{port}/")).text


async def test_a_certificate_is_shown_and_a_renewed_one_taken(tmp_path):
    first = make_authority(tmp_path / "first")
    first.issue("rest", user="rest", hosts=("localhost",))
    certificate, key = first.folder / "rest.crt", first.folder / "rest.key"
    async with serve_http("127.0.0.1:0", APP, certificate=certificate, key=key) as port:
        assert await fetch(port, first) == "here"
        second = make_authority(tmp_path / "second")
        second.issue("rest", user="rest", hosts=("localhost",))
        key.write_bytes((second.folder / "rest.key").read_bytes())
        certificate.write_bytes((second.folder / "rest.crt").read_bytes())
        assert await fetch(port, first) == "here"
        assert await fetch(port, second) == "here"


async def test_connections_that_never_shake_hands_are_counted_and_ended(tmp_path):
    authority = make_authority(tmp_path)
    authority.issue("rest", user="rest", hosts=("localhost",))
    files = {"certificate": tmp_path / "rest.crt", "key": tmp_path / "rest.key"}
    async with (
        serve_http(
            "127.0.0.1:0", APP, connections_per_peer=2, header_deadline_s=1.0, **files
        ) as port,
        asyncio.timeout(20),
    ):
        half_open = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert await half_open[2][0].read() == b""
        assert not any(reader.at_eof() for reader, _ in half_open[:2]), "one was too many"
        for reader, _ in half_open[:2]:
            with suppress(ConnectionError):
                assert await reader.read() == b""
        assert await fetch(port, authority) == "here"
        for _, writer in half_open:
            writer.close()


def test_a_body_does_not_wait_until_its_headers_are_acknowledged():
    with (
        listen("127.0.0.1:0") as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@asynccontextmanager
async def raw(port: int):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> bytes:
    """Returns the status line, or nothing if the server closed the connection."""
    with suppress(ConnectionError):
        return (await reader.readline()).strip()
    return b""


@pytest.mark.parametrize(
    "begin",
    [b"GET / HTTP/1.1\r\nX-Long: ", b"GET /", b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 101],
    ids=["value", "line", "number"],
)
async def test_headers_without_end_are_rejected(begin):
    async with serve_http("127.0.0.1:0", APP) as port, raw(port) as (reader, writer):
        writer.write(begin)
        writer.write(b"a" * (65 << 10))
        async with asyncio.timeout(5):
            assert await answer(reader) == b"HTTP/1.1 431 Request Header Fields Too Large"
            with suppress(ConnectionError):
                await reader.read()


@pytest.mark.parametrize(
    "framing",
    [b"1\r\na\r\n0\r\nX-Trailer: ", b"1;extension=", b"0" * 10],
    ids=["trailer", "extension", "size"],
)
@pytest.mark.parametrize("is_answered", [True, False])
async def test_a_chunked_body_whose_framing_has_no_end_is_rejected(framing, is_answered):
    async def app(scope, receive, send):
        while not is_answered and (await receive())["type"] != "http.disconnect":
            pass
        await PlainTextResponse("here")(scope, receive, send)

    begin = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with (
        serve_http("127.0.0.1:0", app) as port,
        raw(port) as (reader, writer),
        asyncio.timeout(10),
    ):
        with suppress(ConnectionError):
            writer.write(begin + framing)
            for _ in range(64):
                writer.write(b"0" * (16 << 10))
                await writer.drain()
            while await reader.read(1 << 16):
                pass


async def test_headers_of_64_kib_are_served():
    async with serve_http("127.0.0.1:0", APP) as port, raw(port) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * (63 << 10) + b"\r\n\r\n")
        assert await answer(reader) == b"HTTP/1.1 200 OK"


async def test_of_large_requests_of_many_connections_the_largest_are_ended():
    async with (
        serve_http("127.0.0.1:0", APP, max_request_bytes=100_000) as port,
        AsyncExitStack() as stack,
    ):
        peers = []
        for size in (10_000, 40_000, 45_000, 30_000):
            reader, writer = await stack.enter_async_context(raw(port))
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * size)
            peers.append((reader, writer))
        async with asyncio.timeout(5):
            assert await answer(peers[2][0]) == b""
            for reader, writer in (peers[0], peers[1], peers[3]):
                writer.write(b"\r\n\r\n")
                assert await answer(reader) == b"HTTP/1.1 200 OK"


POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n"


async def test_a_body_counts_until_its_connection_closes():
    async def app(scope, receive, send):
        while (await receive())["type"] != "http.disconnect":
            pass

    async with (
        serve_http("127.0.0.1:0", app, max_request_bytes=100_000) as port,
        raw(port) as (reader, writer),
    ):
        writer.write(POST + b"a" * 150_000)
        async with asyncio.timeout(5):
            assert await answer(reader) == b""


async def test_a_body_is_read_as_fast_as_the_application_takes_it():
    may_read, sizes = asyncio.Event(), []

    async def app(scope, receive, send):
        if scope["method"] == "POST":
            await may_read.wait()
            sizes.append(len((await receive())["body"]))
        await PlainTextResponse("here")(scope, receive, send)

    async with (
        serve_http("127.0.0.1:0", app) as port,
        raw(port) as (reader, writer),
        asyncio.timeout(5),
    ):
        writer.write(POST + b"a" * 150_000)
        for _ in range(20):  # gives the server time to read the whole body
            async with raw(port) as (other, asking):
                asking.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                assert await answer(other) == b"HTTP/1.1 200 OK"
        may_read.set()
        assert await answer(reader) == b"HTTP/1.1 200 OK"
    assert 0 < sizes[0] <= 16 << 10


CLOSED = POST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")


@pytest.mark.parametrize("request_bytes", [CLOSED + b"a" * 150_000, b"GET / HTTP/1.1\r\n" * 9000])
async def test_a_refused_peer_reads_the_response_even_if_it_is_still_sending(request_bytes):
    async def refuse(scope, receive, send):
        await PlainTextResponse("too large", 413)(scope, receive, send)

    def ask(port: int) -> tuple[bytes, BaseException | None]:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(request_bytes)
            time.sleep(
                0.3
            )  # by then, a server that does not wait has answered and closed the connection
            failure = None
            try:
                connection.sendall(b"a" * 50_000)
            except OSError as error:
                failure = error
            response = b""
            while chunk := connection.recv(1 << 16):
                response += chunk
        return response, failure

    async with serve_http("127.0.0.1:0", refuse) as port, asyncio.timeout(20):
        response, failure = await asyncio.to_thread(ask, port)
    assert response.startswith(b"HTTP/1.1 4")
    assert failure is None


async def test_a_refused_peer_that_never_ends_is_cut_off(monkeypatch):
    monkeypatch.setattr(limits, "_LINGER_S", 0.2)

    async def refuse(scope, receive, send):
        await PlainTextResponse("too large", 413)(scope, receive, send)

    async with serve_http("127.0.0.1:0", refuse) as port, raw(port) as (reader, writer):
        writer.write(CLOSED)
        async with asyncio.timeout(10):
            assert await answer(reader) == b"HTTP/1.1 413 Request Entity Too Large"
            with pytest.raises(ConnectionError):
                while True:
                    writer.write(b"a" * 1000)
                    await writer.drain()
                    await asyncio.sleep(0.01)


async def test_the_oldest_connections_that_have_not_authenticated_are_ended():
    async def app(scope, receive, send):
        if scope["path"] == "/admitted":
            limits.admit(scope)
        await PlainTextResponse("here")(scope, receive, send)

    async with (
        serve_http("127.0.0.1:0", app, max_unauthenticated=2) as port,
        AsyncExitStack() as stack,
        asyncio.timeout(10),
    ):
        peers = []
        for path in (b"/admitted", b"/", b"/", b"/admitted", b"/", b"/"):
            reader, writer = await stack.enter_async_context(raw(port))
            writer.write(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path)
            assert await answer(reader) == b"HTTP/1.1 200 OK"
            peers.append((reader, writer))
        for index in (1, 2):
            with suppress(ConnectionError):
                await peers[index][0].read()
        for index in (0, 3, 4, 5):
            reader, writer = peers[index]
            assert (await reader.readuntil(b"here")).endswith(b"here")
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert await answer(reader) == b"HTTP/1.1 200 OK"


async def test_a_server_without_authentication_ends_no_connection_for_the_lack_of_it():
    async with (
        serve_http("127.0.0.1:0", APP, authenticates=False, max_unauthenticated=2) as port,
        AsyncExitStack() as stack,
        asyncio.timeout(10),
    ):
        peers = [await stack.enter_async_context(raw(port)) for _ in range(5)]
        for reader, writer in peers:
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert await answer(reader) == b"HTTP/1.1 200 OK"


async def test_unfinished_handshakes_are_connections_that_have_not_authenticated(tmp_path):
    authority = make_authority(tmp_path)
    authority.issue("rest", user="rest", hosts=("localhost",))
    files = {"certificate": tmp_path / "rest.crt", "key": tmp_path / "rest.key"}
    async with (
        serve_http("127.0.0.1:0", APP, max_unauthenticated=2, **files) as port,
        AsyncExitStack() as stack,
        asyncio.timeout(10),
    ):
        half_open = [await stack.enter_async_context(raw(port)) for _ in range(3)]
        with suppress(ConnectionError):
            assert await half_open[0][0].read() == b""
        assert await fetch(port, authority) == "here"


async def test_a_peer_that_does_not_wait_for_answers_is_cut_off():
    num_begun, may_end = 0, asyncio.Event()

    async def app(scope, receive, send):
        nonlocal num_begun
        num_begun += 1
        await may_end.wait()

    async with serve_http("127.0.0.1:0", app) as port, raw(port) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
        async with asyncio.timeout(5):
            assert await answer(reader) == b""
        may_end.set()
    assert num_begun <= 1


async def test_blank_lines_do_not_keep_a_connection_open():
    async with (
        serve_http("127.0.0.1:0", APP, header_deadline_s=0.2) as port,
        raw(port) as (reader, writer),
    ):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await answer(reader) == b"HTTP/1.1 200 OK"
        writer.write(b"\r\n")
        async with asyncio.timeout(5):
            with suppress(ConnectionError):
                await reader.read()


async def test_an_unread_response_ends_with_its_connection(monkeypatch):
    monkeypatch.setattr(limits, "_READ_DEADLINE_S", 0.1)
    ended = asyncio.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while (await asyncio.wait_for(receive(), 0.001))["type"] != "http.disconnect":
                pass
        except TimeoutError:
            pass
        for _ in range(1000):
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
        ended.set()

    async with serve_http("127.0.0.1:0", app) as port, raw(port) as (_, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(10):
            await ended.wait()


async def test_an_upgrade_is_served_as_a_plain_request():
    async with serve_http("127.0.0.1:0", APP) as port, raw(port) as (reader, writer):
        about = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n" + about + b"Sec-WebSocket-Key: a\r\n\r\n")
        assert await answer(reader) == b"HTTP/1.1 200 OK"


async def test_a_request_of_a_connection_that_was_accepted_is_answered_although_the_server_ends():
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(serve_http("127.0.0.1:0", APP))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(0.1)  # accepted, without a byte
        ending = asyncio.create_task(stack.pop_all().aclose())
        await asyncio.sleep(0.1)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
        await ending
