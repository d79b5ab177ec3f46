"""Serves an ASGI application with uvicorn inside this process's event loop."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.types import ASGIApp

from services.common.errors import InvalidArgumentError

_STOP_GRACE_S = 1


@asynccontextmanager
async def serve_http(bind: str, app: ASGIApp) -> AsyncIterator[int]:
    """Serve until the block ends.

    Args:
        bind: ``host:port``; port 0 takes a free one.
        app: The application.

    Yields:
        The port that is served.

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
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_STOP_GRACE_S,
            lifespan="off",
        )
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield
