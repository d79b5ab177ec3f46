"""Offers sandboxes over HTTP to agents and environments, which run in other processes.

::

    POST /v1/run       {"command", "timeout_s", "stdin"} -> {"exit_status", "output", "is_truncated", "limit"}
    GET  /v1/file?path=PATH                              -> the content
    PUT  /v1/file?path=PATH  the content                 -> {}
    POST /v1/snapshot  {}                                -> {"snapshot"}
    POST /v1/restore   {"snapshot"}                      -> {}

Each request has the key of its episode as ``Authorization: Bearer``. An error is ``{"error": message}``.
"""

import asyncio
import functools
import inspect
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.common.http.limits import admit
from services.common.http.server import serve_http
from services.rollout.sandbox.base import CommandResult, SandboxError
from services.rollout.sandbox.pool import EpisodeSandbox, SandboxPool

_KEEP_ALIVE_S = 75
_MAX_REQUEST_BYTES = 1 << 30
# Above the longest command; the service has the deadlines of commands.
_TIMEOUT_S = 4000.0


class _Command(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    command: str
    timeout_s: float | None = Field(None, gt=0)
    stdin: str = ""


class SandboxService:
    """Runs the sandboxes of episodes, and serves them to other processes."""

    def __init__(self, pool: SandboxPool) -> None:
        self._pool = pool
        self._url = ""
        self._sandboxes: dict[str, EpisodeSandbox] = {}

    @asynccontextmanager
    async def serving(self, bind: str, *, host: str) -> AsyncIterator["SandboxService"]:
        """Serves until the block ends.

        Args:
            bind: ``host:port``; port 0 selects a free one.
            host: Host name by which other processes reach it.

        Raises:
            ValueError: If sandboxes cannot start here; the message has the key.
        """
        app = Starlette(
            routes=[
                Route("/v1/run", self._answers(_run), methods=["POST"]),
                Route("/v1/file", self._answers(_read), methods=["GET"]),
                Route("/v1/file", self._answers(_write), methods=["PUT"]),
                Route("/v1/snapshot", self._answers(_snapshot), methods=["POST"]),
                Route("/v1/restore", self._answers(_restore), methods=["POST"]),
            ]
        )
        await self._pool.prepare()
        try:
            async with serve_http(
                bind, app, max_request_bytes=_MAX_REQUEST_BYTES, keep_alive_s=_KEEP_ALIVE_S
            ) as port:
                self._url = f"http://{host}:{port}/v1"
                yield self
        finally:
            await self._pool.close()

    @asynccontextmanager
    async def open(self, row: Mapping[str, Any]) -> AsyncIterator[EpisodeSandbox]:
        """Runs a sandbox while the block runs, and accepts requests with its key.

        Raises:
            CallError: If it does not start.
        """
        async with self._pool.open(row) as sandbox:
            key = f"sb-{secrets.token_urlsafe(32)}"
            self._sandboxes[key] = sandbox
            sandbox.access = {"url": self._url, "key": key}
            try:
                yield sandbox
            finally:
                del self._sandboxes[key]

    def _answers(
        self, handle: Callable[[EpisodeSandbox, Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            sandbox = self._sandboxes.get(key) if scheme.lower() == "bearer" else None
            if sandbox is None:
                return _refusal(401, "this key does not belong to a running episode's sandbox")
            admit(request.scope)
            try:
                return await handle(sandbox, request)
            except SandboxError as error:
                return _refusal(409, str(error))
            except (ValueError, KeyError, TypeError) as error:
                return _refusal(400, f"the request is invalid: {error!r}")

        return answer


class RemoteSandbox:
    """Client of one episode's sandbox, with the methods of ``EpisodeSandbox``.

    Args:
        access: ``url`` and ``key``.
    """

    def __init__(self, access: Mapping[str, str]) -> None:
        self._url = access["url"]
        self._headers = {"Authorization": f"Bearer {access['key']}"}

    async def run(
        self, command: str, *, timeout_s: float | None = None, stdin: str = ""
    ) -> CommandResult:
        """Runs a shell command. Raises SandboxError if the sandbox has died."""
        body = {"command": command, "timeout_s": timeout_s, "stdin": stdin}
        answer = json.loads(await self._send("POST", "/run", json=body))
        return CommandResult(**{**answer, "output": answer["output"].encode()})

    async def read(self, path: str) -> bytes:
        """Returns the content of a file. Raises SandboxError."""
        return await self._send("GET", "/file", params={"path": path})

    async def write(self, path: str, content: bytes | str) -> None:
        """Writes a file and creates its folders. Raises SandboxError."""
        data = content.encode() if isinstance(content, str) else content
        await self._send("PUT", "/file", params={"path": path}, content=data)

    async def snapshot(self) -> str:
        """Saves the working folder and returns the snapshot's name. Raises SandboxError."""
        return str(json.loads(await self._send("POST", "/snapshot", json={}))["snapshot"])

    async def restore(self, snapshot: str) -> None:
        """Replaces the content of the working folder by that of a snapshot. Raises SandboxError."""
        await self._send("POST", "/restore", json={"snapshot": snapshot})

    async def _send(self, method: str, path: str, **content: Any) -> bytes:
        response = await _client().request(
            method, self._url + path, headers=self._headers, **content
        )
        if not response.is_success:
            raise SandboxError(response.json()["error"])
        return response.content


class BlockingSandbox:
    """:class:`RemoteSandbox` for code in a thread: its methods return results, not awaitables."""

    def __init__(self, sandbox: RemoteSandbox, loop: asyncio.AbstractEventLoop) -> None:
        self._sandbox = sandbox
        self._loop = loop

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._sandbox, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            running = asyncio.run_coroutine_threadsafe(method(*arguments, **keywords), self._loop)
            return running.result()

        return call


def sandbox_argument(access: Mapping[str, str], function: Callable[..., Any]) -> Any:
    """Returns the sandbox for a user's function: asynchronous for a coroutine, else blocking."""
    sandbox = RemoteSandbox(access)
    if inspect.iscoroutinefunction(function):
        return sandbox
    return BlockingSandbox(sandbox, asyncio.get_running_loop())


def _client() -> httpx.AsyncClient:
    return _client_of(asyncio.get_running_loop())


@functools.lru_cache(1)
def _client_of(loop: asyncio.AbstractEventLoop) -> httpx.AsyncClient:
    """Returns the process's client, which keeps connections: a new client per episode would cost 20 ms."""
    del loop
    return httpx.AsyncClient(
        timeout=_TIMEOUT_S, trust_env=False, limits=httpx.Limits(max_connections=None)
    )


async def _run(sandbox: EpisodeSandbox, request: Request) -> Response:
    given = _Command.model_validate_json(await request.body())
    result = await sandbox.run(given.command, timeout_s=given.timeout_s, stdin=given.stdin.encode())
    return JSONResponse({**asdict(result), "output": result.text})


async def _read(sandbox: EpisodeSandbox, request: Request) -> Response:
    content = await sandbox.read(request.query_params["path"])
    return Response(content, media_type="application/octet-stream")


async def _write(sandbox: EpisodeSandbox, request: Request) -> Response:
    await sandbox.write(request.query_params["path"], await request.body())
    return JSONResponse({})


async def _snapshot(sandbox: EpisodeSandbox, request: Request) -> Response:
    del request
    return JSONResponse({"snapshot": await sandbox.snapshot()})


async def _restore(sandbox: EpisodeSandbox, request: Request) -> Response:
    await sandbox.restore(json.loads(await request.body())["snapshot"])
    return JSONResponse({})


def _refusal(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status)
