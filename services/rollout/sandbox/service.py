"""Offers sandboxes over HTTP to agents and environments, which run in other processes.

::

    POST /v1/run       {"command", "timeout_s", "stdin"} -> {"exit_status", "output", "is_truncated", "limit"}
    GET  /v1/file?path=PATH                              -> the content
    PUT  /v1/file?path=PATH  the content                 -> {}
    POST /v1/snapshot  {}                                -> {"snapshot"}
    POST /v1/restore   {"snapshot"}                      -> {}

Each request has the key of its episode as ``Authorization: Bearer``. An error is ``{"error": message}``.
"""

import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.common.http.limits import MAX_UNAUTHENTICATED_EPISODES, admit
from services.common.http.server import serve_http
from services.rollout.sandbox.base import SandboxError
from services.rollout.sandbox.pool import EpisodeSandbox, SandboxPool

_KEEP_ALIVE_S = 75
_MAX_REQUEST_BYTES = 1 << 30


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
                bind,
                app,
                max_unauthenticated=MAX_UNAUTHENTICATED_EPISODES,
                max_request_bytes=_MAX_REQUEST_BYTES,
                keep_alive_s=_KEEP_ALIVE_S,
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


async def _run(sandbox: EpisodeSandbox, request: Request) -> Response:
    command = _Command.model_validate_json(await request.body())
    result = await sandbox.run(
        command.command, timeout_s=command.timeout_s, stdin=command.stdin.encode()
    )
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
