"""HTTP is served on loopback, with TLS where there is a certificate."""

import asyncio
import socket
import ssl
from contextlib import suppress

import httpx
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from services.common.http_server import listen, serve_http
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
            "127.0.0.1:0", APP, connections_per_peer=2, header_deadline_s=3.0, **files
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
