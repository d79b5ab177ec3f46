"""HTTP is served on loopback, with TLS where there is a certificate."""

import socket
import ssl

import httpx
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from services.common.http_server import listen, serve_http
from tests.cluster.pki import make_authority

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


def test_a_body_does_not_wait_until_its_headers_are_acknowledged():
    with (
        listen("127.0.0.1:0") as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
