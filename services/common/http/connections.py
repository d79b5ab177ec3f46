"""Connections of an HTTP client with hundreds of concurrent requests."""

import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import httpx

_KEEPALIVE_S: Final = 3.0
"""Below the 5 s after which uvicorn, which serves vLLM too, closes an idle connection."""


class ReusedConnections(httpx.AsyncBaseTransport):
    """Sends each request over an idle connection, or over a new one.

    A pool of httpcore examines all its connections at each begin and end of a request, so that hundreds of
    concurrent requests occupy a whole core. Here each connection is the only one of a pool.

    Args:
        verify: TLS context; None verifies certificates against the usual authorities.
        uds: Unix socket to connect to instead of the URL's host.
    """

    def __init__(self, *, verify: ssl.SSLContext | None = None, uds: str | None = None) -> None:
        self._verify = verify or httpx.create_ssl_context(trust_env=False)
        self._uds = uds
        self._idle: deque[tuple[float, httpx.AsyncHTTPTransport]] = deque()
        """Idle connections, each with the time of its last request, in ascending order of that time."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Sends a request."""
        # Take the connection that was used last, so that surplus connections expire.
        connection = self._idle.pop()[1] if self._idle else self._connection()

        async def release() -> None:
            await self._release(connection)

        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            await connection.aclose()
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Stream(response.stream, release, connection.aclose)
        return response

    async def aclose(self) -> None:
        """Closes the idle connections."""
        while self._idle:
            await self._idle.pop()[1].aclose()

    def _connection(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=1, keepalive_expiry=_KEEPALIVE_S)
        return httpx.AsyncHTTPTransport(verify=self._verify, uds=self._uds, limits=limits)

    async def _release(self, connection: httpx.AsyncHTTPTransport) -> None:
        now = time.monotonic()
        self._idle.append((now, connection))
        while self._idle and self._idle[0][0] < now - _KEEPALIVE_S:
            await self._idle.popleft()[1].aclose()


class _Stream(httpx.AsyncByteStream):
    """Body of a response, whose connection is idle once the body is closed.

    A connection whose body was not closed completely, because its task was cancelled meanwhile, still counts
    as used by its pool of one. It is closed, because a further request would wait for it forever.
    """

    def __init__(
        self,
        body: httpx.AsyncByteStream,
        release: Callable[[], Awaitable[None]],
        discard: Callable[[], Awaitable[None]],
    ) -> None:
        self._body = body
        self._release = release
        self._discard = discard

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._body:
            yield chunk

    async def aclose(self) -> None:
        try:
            await self._body.aclose()
        except BaseException:
            await self._discard()
            raise
        await self._release()
