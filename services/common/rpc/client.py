"""gRPC client: channels and calls with deadlines, bounded retries, and the peer's error classes."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any, Self, TypeVar, cast

import grpc

from services.common.errors import UnavailableError, from_rpc_error
from services.common.rpc import headers
from services.common.rpc.headers import MeasuredStreams, StreamHeaders, UnaryHeaders
from services.common.rpc.server import MAX_MESSAGE_BYTES
from services.common.security.credentials import current_identity
from services.common.security.tls import Certificate, Peer, Tls, peer_name

Open = Callable[[Certificate], grpc.aio.Channel]


class RenewedChannel:
    """Channel that outlives the certificate it was opened with; it has the methods that stubs use.

    gRPC binds a certificate to a channel: after the certificate has expired, the channel cannot
    reconnect. So each new certificate gets a new channel for later calls; running calls end on the
    old one, whose connection the server closes when it is idle.
    """

    def __init__(self, tls: Tls, open_channel: Open) -> None:
        self._tls = tls
        self._open = open_channel
        self._configuration = tls.current()
        self._channels = [open_channel(self._configuration)]

    def current(self) -> grpc.aio.Channel:
        """Returns the channel with the newest certificate."""
        configuration = self._tls.current()
        if configuration is not self._configuration:
            self._channels.append(self._open(configuration))
            self._configuration = configuration
        return self._channels[-1]

    def unary_unary(self, method: str, *arguments: Any, **options: Any) -> "_Method":
        """Returns a callable for a method with one request and one response."""
        return _Method(self, "unary_unary", method, arguments, options)

    def unary_stream(self, method: str, *arguments: Any, **options: Any) -> "_Method":
        """Returns a callable for a method with one request and a response stream."""
        return _Method(self, "unary_stream", method, arguments, options)

    async def close(self, grace: float | None = None) -> None:
        for channel in self._channels:
            await channel.close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


class _Method:
    """Method bound to the current channel at each call."""

    def __init__(
        self,
        channel: RenewedChannel,
        kind: str,
        method: str,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        self._renewed = channel
        self._make = (kind, method, arguments, options)
        self._method = method.encode()  # same attribute as in gRPC's own callables
        self._channel: grpc.aio.Channel | None = None
        self._bound: Any = None

    def __call__(self, request: Any, **options: Any) -> Any:
        channel = self._renewed.current()
        if channel is not self._channel:
            kind, method, arguments, bound = self._make
            self._bound = getattr(channel, kind)(method, *arguments, **bound)
            self._channel = channel
        return self._bound(request, **options)


RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

TIMEOUT_S = 30.0
"""Default deadline of a call, which waits for nothing but the peer's work."""
_FIRST_DELAY_S = 0.05
_MAX_DELAY_S = 2.0
_MAX_MS = 2**31 - 1  # integers of gRPC's options have 32 bits
_REFUSED = "RST_STREAM with error code 7"
"""gRPC's text for REFUSED_STREAM (RFC 9113, 8.7): the peer has not processed the call.

A server refuses calls beyond ``MAX_CALLS``: calls that arrive before the client knows the limit, and calls
that arrive before the server has removed ended calls. gRPC repeats each refused call only once.
"""


CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Otherwise a stream on which only the peer sends would wait for a silent peer more than a
    # minute.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
)


def open_channel(
    address: str, peer: Peer, *, run_id: str = "", silence_s: float = 10.0
) -> grpc.aio.Channel:
    """Opens a channel to ``host:port`` that detects a dead peer within about 20 seconds.

    It sends this process's identity with every call, and uses renewed certificates.

    Args:
        address: ``host:port`` of the peer.
        peer: Role of the peer; with TLS its certificate must confirm it.
        silence_s: Seconds within which the peer must answer a ping, which is sent every 10 seconds.
    """
    silence_ms = min(round(1000 * silence_s), _MAX_MS)
    silences = {"grpc.keepalive_timeout_ms": silence_ms, "grpc.http2.ping_timeout_ms": silence_ms}
    options = tuple((dict(CHANNEL_OPTIONS) | silences).items())
    identity = current_identity()
    token = identity.token_for(run_id)
    interceptors: list[Any] = [UnaryHeaders(token), StreamHeaders(token), MeasuredStreams()]
    if identity.tls is None:
        return grpc.aio.insecure_channel(address, interceptors=interceptors, options=options)
    # Addresses of workers are unknown when certificates are issued, so their names have the role of
    # the peer.
    name = ("grpc.ssl_target_name_override", peer_name(peer, run_id))

    def show(certificate: Certificate) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(
            address,
            certificate.channel_credentials(),
            interceptors=interceptors,
            options=(*options, name),
        )

    return cast("grpc.aio.Channel", RenewedChannel(identity.tls, show))


async def call(
    method: grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT],
    request: RequestT,
    *,
    timeout_s: float = TIMEOUT_S,
    idempotent: bool = False,
) -> ResponseT:
    """Calls a unary method.

    Args:
        idempotent: Allows retries if the peer could not be reached. A call that the peer has refused
            unprocessed is always retried.

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
            is_repeatable = idempotent or _REFUSED in (rpc_error.details() or "")
            if not (is_repeatable and isinstance(error, UnavailableError) and rest_s > delay_s):
                raise error from rpc_error
        await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))  # noqa: S311  jitter, not a secret
        delay_s = min(2 * delay_s, _MAX_DELAY_S)


def _name(method: Any) -> str:
    raw = getattr(method, "_method", b"")
    return raw.decode() if isinstance(raw, bytes) else str(raw)
