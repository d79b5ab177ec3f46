"""What every call carries beside its request: who makes it, and what for."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from services.common import tracing

_Continuation = Callable[[grpc.aio.ClientCallDetails, Any], Awaitable[Any]]


class UnaryHeaders(grpc.aio.UnaryUnaryClientInterceptor):
    """Adds headers to unary calls.

    Args:
        token: Who makes the calls; empty for nobody in particular.
    """

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_unary(
        self,
        continuation: _Continuation,
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        """Go on with the headers."""
        return await continuation(_with_headers(client_call_details, self._token), request)


class StreamHeaders(grpc.aio.UnaryStreamClientInterceptor):
    """Adds headers to calls that are answered by a stream.

    Args:
        token: Who makes the calls; empty for nobody in particular.
    """

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_stream(
        self,
        continuation: _Continuation,
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        """Go on with the headers."""
        return await continuation(_with_headers(client_call_details, self._token), request)


def _with_headers(details: Any, token: str) -> Any:
    headers = grpc.aio.Metadata(*(details.metadata or ()))
    if token:
        headers.add("authorization", f"Bearer {token}")
    for name, value in tracing.headers().items():
        headers.add(name, value)
    return details._replace(metadata=headers)
