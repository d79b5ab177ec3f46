"""Serves ``/metrics`` of this process with the limits of its other HTTP servers."""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.common.http.limits import admit
from services.common.http.server import serve_http

_KNOWN_FOR_S = 1.0
_CONNECTIONS_PER_PEER = 16


@asynccontextmanager
async def serve_metrics(
    bind: str, port: int, *, token_file: Path | None = None
) -> AsyncIterator[int]:
    """Serves ``/metrics`` until the block ends; port 0 serves nothing.

    Args:
        bind: ``host:port`` of the process's gRPC server; metrics use the same host.
        token_file: File with the bearer token that scrapes must send; None requires none.

    Yields:
        The port, or 0.

    Raises:
        InvalidArgumentError: If the address cannot be bound.
    """
    if port == 0:
        yield 0
        return
    token = await asyncio.to_thread(token_file.read_bytes) if token_file else b""
    host = bind.rpartition(":")[0]
    serving = serve_http(
        f"{host}:{port}", _app(token.strip()), connections_per_peer=_CONNECTIONS_PER_PEER
    )
    async with serving as served:
        yield served


def _app(token: bytes) -> Starlette:
    page = _Page(REGISTRY)

    async def metrics(request: Request) -> Response:
        shown = request.headers.get("authorization", "").encode("latin-1")
        if token and not hmac.compare_digest(shown, b"Bearer " + token):
            return Response(status_code=401, headers={"WWW-Authenticate": "Bearer"})
        admit(request.scope)
        return Response(await page.read(), media_type=CONTENT_TYPE_LATEST)

    return Starlette(routes=[Route("/metrics", metrics)])


class _Page:
    """Metrics as text, rendered in a thread at most once a second for all requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._text = b""
        self._write_time = -_KNOWN_FOR_S
        self._writing = asyncio.Lock()

    async def read(self) -> bytes:
        async with self._writing:
            if time.monotonic() - self._write_time >= _KNOWN_FOR_S:
                self._text = await asyncio.to_thread(generate_latest, self._registry)
                self._write_time = time.monotonic()
            return self._text
