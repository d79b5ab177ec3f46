"""Serves an ASGI application with uvicorn inside this process's event loop."""

import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from services.common.errors import InvalidArgumentError
from services.common.task_group import TaskGroup

_STOP_GRACE_S = 1


@asynccontextmanager
async def serve_http(
    bind: str, app: ASGIApp, *, certificate: Path | None = None, key: Path | None = None
) -> AsyncIterator[int]:
    """Serve until the block ends.

    Args:
        bind: ``host:port``; port 0 takes a free one.
        app: The application.
        certificate: PEM file with a certificate chain, to serve HTTPS; read again when it changes.
        key: PEM file with its key.

    Yields:
        The port that is served.

    Raises:
        InvalidArgumentError: If the address cannot be bound.
    """
    listener = listen(bind)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_STOP_GRACE_S,
        lifespan="off",
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    if certificate is not None:
        config.load()
        _renew(config, certificate, key)
    server = _Server(config)
    async with TaskGroup() as tasks:
        tasks.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True


def listen(bind: str) -> socket.socket:
    """A listening socket for ``host:port`` whose connections send what is written at once.

    Raises:
        InvalidArgumentError: If the address cannot be bound.
    """
    host, _, port = bind.rpartition(":")
    try:
        listener = socket.create_server((host, int(port)), reuse_port=False)
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot listen on {bind}: {error.strerror}; choose another port, or 0 for any free one",
            bind=bind,
        ) from error
    # Connections inherit it. Without it a body waits for the client to acknowledge the headers, 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _renew(config: uvicorn.Config, certificate: Path, key: Path | None) -> None:
    """Load the certificate again when it has changed: each handshake looks, the next one shows it."""
    loaded_ns = certificate.stat().st_mtime_ns

    def look(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal loaded_ns
        if certificate.stat().st_mtime_ns != loaded_ns:
            loaded_ns = certificate.stat().st_mtime_ns
            context.load_cert_chain(certificate, key)

    assert config.ssl is not None
    config.ssl.sni_callback = look


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield
