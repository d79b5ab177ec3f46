"""What every call carries beside its request: who makes it, and what for."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from services.common import tracing

_Continuation = Callable[[grpc.aio.ClientCallDetails, Any], Awaitable[Any]]


class _Headers:
    """Adds headers to calls.

    Args:
        token: Who makes the calls; empty for nobody in particular.
    """

    def __init__(self, token: str) -> None:
        self._token = token

    async def go_on(
        self,
        continuation: _Continuation,
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        """Make a call with the headers."""
        return await continuation(_with_headers(client_call_details, self._token), request)


class UnaryHeaders(_Headers, grpc.aio.UnaryUnaryClientInterceptor):
    """Adds headers to unary calls."""

    intercept_unary_unary = _Headers.go_on


class StreamHeaders(_Headers, grpc.aio.UnaryStreamClientInterceptor):
    """Adds headers to calls that are answered by a stream."""

    intercept_unary_stream = _Headers.go_on


def _with_headers(details: Any, token: str) -> Any:
    headers = grpc.aio.Metadata(*(details.metadata or ()))
    if token:
        headers.add("authorization", f"Bearer {token}")
    for name, value in tracing.headers().items():
        headers.add(name, value)
    return details._replace(metadata=headers)
