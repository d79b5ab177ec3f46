"""Tests that services for rollouts on other hosts reject unauthenticated requests."""

import argparse
import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from services.extras.environments.client import HttpEnvironment
from services.extras.environments.guard import Guard, serve_guarded
from services.extras.environments.host import Host
from services.rollout.calls.outside import AddressPolicy, ExternalService
from services.rollout.failures import CallError

TOKEN = b"0123456789abcdef0123456789abcdef"
KNOWN = {"Authorization": f"Bearer {TOKEN.decode()}"}
JSON = {"Content-Type": "application/json"}


async def size(request: Request) -> JSONResponse:
    return JSONResponse(len(await request.body()))


def client(token: bytes = TOKEN, max_body_bytes: int = 100) -> httpx.AsyncClient:
    app = Starlette(
        routes=[
            Route("/", size, methods=["GET", "POST"]),
            Route("/healthz", lambda _: JSONResponse({})),
        ]
    )
    guard = Guard(app, token=token, max_body_bytes=max_body_bytes)
    return httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://127.0.0.1:1")


async def test_a_body_that_a_disconnect_cuts_off_is_not_served():
    async def app(scope, receive, send):
        raise AssertionError("served")

    messages = [
        {"type": "http.request", "body": b"{}", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive():
        return messages.pop(0)

    headers = {**KNOWN, **JSON, "Transfer-Encoding": "chunked"}
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": pairs}
    with pytest.raises(ClientDisconnect):
        await Guard(app, token=TOKEN)(scope, receive, None)


class Endless(httpx.AsyncByteStream):
    """Request body of 64,000 bytes without a Content-Length that counts the chunks read."""

    def __init__(self) -> None:
        self.num_read = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(1000):
            self.num_read += 1
            yield b" " * 64


@pytest.mark.parametrize(
    ("headers", "content", "status"),
    [
        ({**KNOWN, **JSON}, b"{}", 200),
        (KNOWN, b"", 200),
        ({**KNOWN, "Content-Type": "application/json; charset=utf-8"}, b"{}", 200),
        (JSON, b"{}", 401),
        ({**JSON, "Authorization": "Bearer "}, b"{}", 401),
        ({**JSON, "Authorization": f"Bearer {TOKEN.decode()[:-1]}"}, b"{}", 401),
        ({**JSON, "Authorization": f"Basic {TOKEN.decode()}"}, b"{}", 401),
        ({**JSON, "Authorization": "Bearer \xe9"}, b"{}", 401),
        ({**KNOWN, **JSON, "Origin": "https://evil.example"}, b"{}", 403),
        ({**KNOWN, **JSON, "Origin": "null"}, b"{}", 403),
        ({**KNOWN, "Content-Type": "text/plain"}, b"{}", 415),
        (KNOWN, b"{}", 415),
        ({**KNOWN, **JSON}, b"x" * 100, 200),
        ({**KNOWN, **JSON}, b"x" * 101, 413),
    ],
)
async def test_requests_need_a_token_and_json(
    headers: dict[str, str], content: bytes, status: int
) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    answer = await client().post("/", content=content, headers=encoded)
    assert answer.status_code == status
    assert answer.json() == len(content) if status == 200 else "error" in answer.json()


async def test_a_body_is_read_up_to_its_limit_and_not_without_a_token() -> None:
    for headers, status, most in (({**KNOWN, **JSON}, 413, 4), (JSON, 401, 0)):
        body = Endless()
        answer = await client().post("/", content=body, headers=headers)
        assert answer.status_code == status
        assert body.num_read <= most


async def test_health_needs_no_token_and_a_socket_of_this_user_none_at_all() -> None:
    assert (await client().get("/healthz")).status_code == 200
    assert (await client(token=b"").get("/")).status_code == 200


async def test_nothing_is_served_to_others_without_a_token(tmp_path: Path) -> None:
    namespace = argparse.Namespace(
        bind="127.0.0.1:0", token_file=None, tls_certificate=None, tls_key=None
    )
    with pytest.raises(ValueError, match="--token-file"):
        serve_guarded(Starlette(), namespace)


class Echo:
    """Environment that returns the task and each message unchanged."""

    def reset(self, task: object, *, seed: int) -> str:
        return f"{task}"

    def step(self, message: dict[str, str]) -> dict[str, object]:
        return {"messages": message["content"], "done": True, "reward": 1.0}


async def test_a_rollout_shows_the_token_of_its_environment(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(TOKEN + b"\n")
    namespace = argparse.Namespace(
        bind="127.0.0.1:0", token_file=tmp_path / "token", tls_certificate=None, tls_key=None
    )
    async with serve_guarded(Host(Echo, "echo", {}).app(), namespace) as port, asyncio.timeout(30):
        for token in (TOKEN.decode(), ""):
            service = ExternalService(
                f"http://127.0.0.1:{port}", reach=AddressPolicy({"127.0.0.1"}), token=token
            )
            games = HttpEnvironment("echo", service, timeout_s=10.0, wait_s=1.0)
            try:
                if token:
                    session, _ = await games.begin({"a": 1}, seed=0)
                    assert (await session.step({"role": "assistant", "content": "x"})).is_done
                else:
                    with pytest.raises(CallError, match="the token is missing"):
                        await games.check()
            finally:
                await service.close()
