"""Serves ASGI applications, and ``/metrics``, with uvicorn in this process's event loop."""

import asyncio
import hmac
import logging
import socket
import ssl
import time
from asyncio import sslproto
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.admission import listen
from services.common.http.limits import (
    HEADER_DEADLINE_S,
    MAX_REQUEST_BYTES,
    MAX_UNAUTHENTICATED,
    Connections,
    OncePerMinute,
    admit,
    counted,
    limited,
)
from services.common.task_group import TaskGroup

_STOP_GRACE_S = 1
_UNREAD_TRIES = 50
# Max connections that are accepted before others are served. asyncio has one option for this and for
# the length of the kernel's queue, which the listener already has.
_ACCEPTED_AT_ONCE = 32
# Size of a TLS record; asyncio allocates a buffer of 256 KiB for each connection.
sslproto.SSLProtocol.max_size = 16 << 10
_ACCEPTS = OncePerMinute()
_METRICS_MAX_AGE_S = 1.0
_SCRAPERS_PER_PEER = 16


@asynccontextmanager
async def serve_http(  # noqa: PLR0913 -- as many limits
    bind: str,
    app: ASGIApp,
    *,
    listener: socket.socket | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    connections_per_peer: int = 0,
    authenticates: bool = True,
    max_unauthenticated: int = MAX_UNAUTHENTICATED,
    max_request_bytes: int = MAX_REQUEST_BYTES,
    header_deadline_s: float = HEADER_DEADLINE_S,
    keep_alive_s: int = 5,
) -> AsyncIterator[int]:
    """Serves until the block ends, within the limits of :mod:`services.common.http.limits`.

    Args:
        bind: Address as for :func:`listen`.
        app: The application; it calls :func:`services.common.http.limits.admit` for each request that
            it has authenticated.
        listener: Listening socket to use in place of ``bind``; it is closed with the server.
        certificate: PEM file with a certificate chain, to serve HTTPS; reloaded when it changes.
        connections_per_peer: Max simultaneous connections of one address; 0 for no limit.
        authenticates: False if peers need not authenticate, because only this user can connect.
        max_unauthenticated: Max connections whose peer has not authenticated.
        max_request_bytes: Max total size of all requests in progress.
        header_deadline_s: Max seconds until the headers of a request, and of a TLS handshake.
        keep_alive_s: Seconds after a response in which a connection may send another request.

    Yields:
        The port; 0 for a Unix socket.

    Raises:
        InvalidArgumentError: If the address cannot be bound.
    """
    connections = Connections(
        connections_per_peer,
        max_request_bytes,
        authenticates=authenticates,
        max_unauthenticated=max_unauthenticated,
    )
    listener = counted(listen(bind) if listener is None else listener, connections)
    logging.getLogger("asyncio").addFilter(_ACCEPTS)
    config = uvicorn.Config(
        _ending_quietly(app),
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_STOP_GRACE_S,
        timeout_keep_alive=keep_alive_s,
        lifespan="off",
        # WebSockets would bypass the limits.
        ws="none",
        http=limited(connections, header_deadline_s),
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    if certificate is not None:
        config.load()
        _renew(config, certificate, key)
    server = _Server(config, header_deadline_s)
    async with TaskGroup() as tasks:
        tasks.create_task(server.serve(sockets=[listener]))
        try:
            yield 0 if listener.family == socket.AF_UNIX else listener.getsockname()[1]
        finally:
            server.should_exit = True


def _ending_quietly(app: ASGIApp) -> ASGIApp:
    """Returns an application that logs no error for a peer that disconnects before its body ends."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await app(scope, receive, send)

    return serve


def _renew(config: uvicorn.Config, certificate: Path, key: Path | None) -> None:
    """Reloads a changed certificate: each handshake checks the file, and the next handshake uses it."""
    loaded_ns = certificate.stat().st_mtime_ns

    def look(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal loaded_ns
        if certificate.stat().st_mtime_ns != loaded_ns:
            loaded_ns = certificate.stat().st_mtime_ns
            context.load_cert_chain(certificate, key)

    assert config.ssl is not None
    config.ssl.sni_callback = look


class _Server(uvicorn.Server):
    """Server that leaves signals to the process and applies the header deadline to TLS handshakes."""

    def __init__(self, config: uvicorn.Config, deadline_s: float) -> None:
        super().__init__(config)
        self._deadline_s = deadline_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        loop, context = asyncio.get_running_loop(), self.config.ssl
        for listener in sockets or ():
            server = await loop.create_server(
                self._protocol,
                sock=listener,
                ssl=context,
                ssl_handshake_timeout=self._deadline_s if context else None,
                backlog=_ACCEPTED_AT_ONCE,
            )
            self.servers.append(server)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends as uvicorn does, but first reads the requests of connections that it has accepted."""
        for server in self.servers:
            server.close()
        connections: set[Any] = self.server_state.connections
        for _ in range(_UNREAD_TRIES):
            if all(connection.cycle is not None for connection in connections):
                break
            await asyncio.sleep(0.01)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures no signals."""
        yield

    def _protocol(self) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = kind(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol


@asynccontextmanager
async def serve_metrics(
    bind: str, port: int, *, token_file: Path | None = None
) -> AsyncIterator[int]:
    """Serves ``/metrics`` of this process until the block ends, with the limits of its other HTTP servers.

    Port 0 serves nothing.

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
        f"{host}:{port}", _metrics_app(token.strip()), connections_per_peer=_SCRAPERS_PER_PEER
    )
    async with serving as bound:
        yield bound


def _metrics_app(token: bytes) -> Starlette:
    page = _MetricsPage(REGISTRY)

    async def metrics(request: Request) -> Response:
        credentials = request.headers.get("authorization", "").encode("latin-1")
        if token and not hmac.compare_digest(credentials, b"Bearer " + token):
            return Response(status_code=401, headers={"WWW-Authenticate": "Bearer"})
        admit(request.scope)
        return Response(await page.read(), media_type=CONTENT_TYPE_LATEST)

    return Starlette(routes=[Route("/metrics", metrics)])


class _MetricsPage:
    """Metrics as text, rendered in a thread at most once a second for all requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._text = b""
        self._write_time = -_METRICS_MAX_AGE_S
        self._writing = asyncio.Lock()

    async def read(self) -> bytes:
        async with self._writing:
            if time.monotonic() - self._write_time >= _METRICS_MAX_AGE_S:
                self._text = await asyncio.to_thread(generate_latest, self._registry)
                self._write_time = time.monotonic()
            return self._text
