"""Client interceptors that add identity and trace headers to calls and measure message sizes."""

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache
from typing import Any

import grpc
from prometheus_client import Histogram

from services.common.telemetry import tracing

_Continuation = Callable[[grpc.aio.ClientCallDetails, Any], Awaitable[Any]]


class _Headers:
    """Adds headers to calls.

    Args:
        token: Bearer token of the caller; empty for none.
    """

    def __init__(self, token: str) -> None:
        self._token = token

    async def continue_call(
        self,
        continuation: _Continuation,
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        return await continuation(_with_headers(client_call_details, self._token), request)


class UnaryHeaders(_Headers, grpc.aio.UnaryUnaryClientInterceptor):
    """Adds headers to unary calls."""

    intercept_unary_unary = _Headers.continue_call


class StreamHeaders(_Headers, grpc.aio.UnaryStreamClientInterceptor):
    """Adds headers to calls with a response stream."""

    intercept_unary_stream = _Headers.continue_call


def _with_headers(details: Any, token: str) -> Any:
    headers = grpc.aio.Metadata(*(details.metadata or ()))
    if token:
        headers.add("authorization", f"Bearer {token}")
    for name, value in tracing.headers().items():
        headers.add(name, value)
    return details._replace(metadata=headers)


MESSAGE_BYTES = Histogram(
    "slipstream_grpc_message_bytes",
    "Size of gRPC messages that this process sent and received.",
    ["method", "direction"],
    buckets=(256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20),
)


def sent(method: str, message: Any) -> None:
    """Records the size of a message that this process sent."""
    _sizes(method, "sent").observe(message.ByteSize())


def received(method: str, message: Any) -> None:
    """Records the size of a message that this process received."""
    _sizes(method, "received").observe(message.ByteSize())


@cache
def _sizes(method: str, direction: str) -> Histogram:
    return MESSAGE_BYTES.labels(method, direction)


class MeasuredStreams(grpc.aio.UnaryStreamClientInterceptor):
    """Records message sizes of response streams; ``call`` records those of unary calls."""

    async def intercept_unary_stream(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, Any], Awaitable[Any]],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> AsyncIterator[Any]:
        method = client_call_details.method
        name = method.decode() if isinstance(method, bytes) else method
        sent(name, request)
        call = await continuation(client_call_details, request)

        async def responses() -> AsyncIterator[Any]:
            async for response in call:
                received(name, response)
                yield response

        return responses()
