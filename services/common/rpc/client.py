"""gRPC client: channels and calls with deadlines, bounded retries, and the peer's error classes."""

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
_MAX_DELAY_S = 2.0


CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Otherwise a stream on which only the peer sends would wait more than a minute for a silent
    # one.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
)


def open_channel(address: str, peer: Peer, *, run_id: str = "") -> grpc.aio.Channel:
    """Opens a channel to ``host:port`` that detects a dead peer within about 20 seconds.

    It sends this process's identity with every call, and uses renewed certificates.

    Args:
        address: ``host:port`` of the peer.
        peer: Role of the peer; with TLS its certificate must confirm it.
        run_id: Run of the called worker.
    """
    identity = current_identity()
    token = identity.token_for(run_id)
    interceptors: list[Any] = [UnaryHeaders(token), StreamHeaders(token), MeasuredStreams()]
    if identity.tls is None:
        return grpc.aio.insecure_channel(
            address, interceptors=interceptors, options=CHANNEL_OPTIONS
        )
    # Addresses of workers are unknown when certificates are issued, so their names have the role of
    # the peer.
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
    """Calls a unary method.

    Args:
        method: A method of a generated stub.
        request: Its request.
        timeout_s: Deadline of the call, including all retries.
        idempotent: Allows retries if the peer could not be reached.

    Raises:
        ServiceError: The class that the peer raised; UnavailableError or DeadlineExceededError if
            it did not respond.
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
        delay_s = min(2 * delay_s, _MAX_DELAY_S)


def _name(method: Any) -> str:
    raw = getattr(method, "_method", b"")
    return raw.decode() if isinstance(raw, bytes) else str(raw)
