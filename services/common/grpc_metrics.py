"""How large the messages of the control plane are, by method and direction."""

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache
from typing import Any

import grpc
from prometheus_client import Histogram

MESSAGE_BYTES = Histogram(
    "slipstream_grpc_message_bytes",
    "Size of gRPC messages that this process sent and received.",
    ["method", "direction"],
    buckets=(256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20),
)


def sent(method: str, message: Any) -> None:
    """Record a message that this process sent."""
    _sizes(method, "sent").observe(message.ByteSize())


def received(method: str, message: Any) -> None:
    """Record a message that this process received."""
    _sizes(method, "received").observe(message.ByteSize())


@cache
def _sizes(method: str, direction: str) -> Histogram:
    return MESSAGE_BYTES.labels(method, direction)


class MeasuredStreams(grpc.aio.UnaryStreamClientInterceptor):
    """Records the messages of server streams; unary calls are recorded where they are made."""

    async def intercept_unary_stream(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, Any], Awaitable[Any]],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> AsyncIterator[Any]:
        """Wrap the responses of a call."""
        method = client_call_details.method
        name = method.decode() if isinstance(method, bytes) else method
        sent(name, request)
        call = await continuation(client_call_details, request)

        async def responses() -> AsyncIterator[Any]:
            async for response in call:
                received(name, response)
                yield response

        return responses()
