"""One way to call gRPC: deadlines, bounded retries, errors as the classes that the peer raised."""

import asyncio
import random
import time
from typing import Any, TypeVar, cast

import grpc

from services.common.errors import UnavailableError, from_rpc_error
from services.common.rpc import headers
from services.common.rpc.headers import MeasuredStreams, StreamHeaders, UnaryHeaders
from services.common.rpc.renewed_channel import RenewedChannel
from services.common.rpc.server import MAX_MESSAGE_BYTES
from services.common.security.credentials import current_identity
from services.common.security.tls import Certificate, Peer, peer_name

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 2.0


CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Or a stream on which only the peer sends would wait for a silent one for more than a minute.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
)


def open_channel(address: str, peer: Peer, *, run_id: str = "") -> grpc.aio.Channel:
    """A channel to ``host:port`` that notices a dead peer within about 20 seconds.

    It shows this process's identity with every call, also when its certificate is renewed.

    Args:
        address: Where the peer is.
        peer: What it is; with TLS its certificate must say so.
        run_id: The run of a worker that is called.
    """
    identity = current_identity()
    token = identity.token_for(run_id)
    interceptors: list[Any] = [UnaryHeaders(token), StreamHeaders(token), MeasuredStreams()]
    if identity.tls is None:
        return grpc.aio.insecure_channel(
            address, interceptors=interceptors, options=CHANNEL_OPTIONS
        )
    # Addresses of workers are not known when certificates are made, so the name says what the peer is.
    name = ("grpc.ssl_target_name_override", peer_name(peer, run_id))

    def show(certificate: Certificate) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(
            address,
            certificate.channel_credentials(),
            interceptors=interceptors,
            options=(*CHANNEL_OPTIONS, name),
        )

    return cast("grpc.aio.Channel", RenewedChannel(identity.tls, show))


async def call(
    method: grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT],
    request: RequestT,
    *,
    timeout_s: float,
    idempotent: bool = False,
) -> ResponseT:
    """Call a unary method.

    Args:
        method: A method of a generated stub.
        request: Its request.
        timeout_s: Deadline of the call, all retries included.
        idempotent: Whether the call may be repeated when the peer could not be reached.

    Raises:
        ServiceError: The class that the peer raised; UnavailableError or DeadlineExceededError if it
            did not answer.
    """
    deadline = time.monotonic() + timeout_s
    delay_s = _FIRST_DELAY_S
    name = _name(method)
    while True:
        try:
            response: ResponseT = await method(
                request, timeout=max(deadline - time.monotonic(), 0.001)
            )
            headers.sent(name, request)
            headers.received(name, response)
            return response
        except grpc.aio.AioRpcError as rpc_error:
            error = from_rpc_error(rpc_error, name)
            rest_s = deadline - time.monotonic()
            if not (idempotent and isinstance(error, UnavailableError) and rest_s > delay_s):
                raise error from rpc_error
        await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))  # noqa: S311  jitter, not a secret
        delay_s = min(2 * delay_s, _LONGEST_DELAY_S)


def _name(method: Any) -> str:
    raw = getattr(method, "_method", b"")
    return raw.decode() if isinstance(raw, bytes) else str(raw)
