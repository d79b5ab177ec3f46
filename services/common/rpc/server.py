"""gRPC server: limits, health, authentication, error mapping, graceful stop."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from services.common.admission import AdmissionProxy, private_socket
from services.common.errors import (
    InternalError,
    InvalidArgumentError,
    ServiceError,
    UnauthenticatedError,
    to_status,
)
from services.common.rpc import headers
from services.common.security.access import HEALTH, authenticate, authorize, check_peer_certificate
from services.common.security.credentials import Identity, current_identity
from services.common.security.tls import server_credentials
from services.common.telemetry import tracing

logger = logging.getLogger(__name__)

# The KVBatchMeta of 100,000 samples has about 10 MiB; no other message is larger.
MAX_MESSAGE_BYTES = 64 << 20
STOP_GRACE_S = 1.0
_MAX_UNKNOWN_BYTES = 128 << 10
"""Limit on what a connection sends before a call of it is authenticated. A TLS handshake, the headers
of many calls, and the 64 KiB of a message that a client sends before the server reads it are less."""

MAX_CALLS = 288
"""Max concurrent calls of a connection: a project's event streams and some others. Further calls wait."""
_Context = grpc.aio.ServicerContext[Any, Any]
_Receive = Callable[[AsyncIterator[Any], _Context], Awaitable[Any]]
"""Admits a caller's connection; reads and checks its request."""
Know = Callable[[str], Awaitable[None]]
"""Authenticates the caller by the ``authorization`` header, or raises a ServiceError."""
SERVER_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Without a limit, a client could open a thousand calls before it is authenticated.
    ("grpc.max_concurrent_streams", MAX_CALLS),
    # Ends silent connections and unfinished handshakes.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Clients reconnect when they use a channel again.
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.so_reuseport", 0),
    # Clients ping every 10 s, also while no call is running.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


@asynccontextmanager
async def serve(
    bind: str,
    register: Callable[[grpc.aio.Server], None],
    *,
    users: Mapping[str, Know] | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> AsyncIterator[int]:
    """Serves until the block ends, then stops gracefully.

    Callers are authenticated with this process's identity: by certificates of its authority, and by
    tokens. Requests of unknown callers are not read.

    Args:
        bind: ``host:port``; port 0 chooses a free one.
        users: Services with their own authentication, by full name.
        max_message_bytes: Max size of a request; a larger one fails with RESOURCE_EXHAUSTED.

    Yields:
        The port.

    Raises:
        InvalidArgumentError: If the address cannot be bound.
    """
    identity = current_identity()
    proxy = AdmissionProxy(_MAX_UNKNOWN_BYTES)
    server = grpc.aio.server(
        interceptors=[_Edge(identity, users or {}, proxy)],
        options=(*SERVER_OPTIONS, ("grpc.max_receive_message_length", max_message_bytes)),
    )
    register(server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)

    def listen_at(path: str) -> None:
        if identity.tls is None:
            server.add_insecure_port(f"unix:{path}")
        else:
            server.add_secure_port(f"unix:{path}", server_credentials(identity.tls))

    with private_socket(listen_at) as target:
        await server.start()
        await health.set("", health_pb2.HealthCheckResponse.SERVING)
        try:
            async with proxy.serve(bind, target) as port:
                try:
                    yield port
                finally:
                    await health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
                    await server.stop(grace=STOP_GRACE_S)
        finally:
            await server.stop(grace=None)


class _Edge(grpc.aio.ServerInterceptor):
    """Authenticates callers; converts ServiceErrors to statuses, and logs other exceptions as INTERNAL.

    Args:
        proxy: Lifts the limits of an authenticated caller's connection.
    """

    def __init__(
        self, identity: Identity, users: Mapping[str, Know], proxy: AdmissionProxy
    ) -> None:
        self._proxy = proxy
        self._identity = identity
        self._users = users
        self._guarded: dict[str, Any] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        user = self._users.get(method[1:].partition("/")[0])
        # Built once per method, as services may receive thousands of calls a second.
        guarded = self._guarded.get(method)
        if guarded is None:
            handler: Any = await continuation(handler_call_details)
            if handler is None or handler.request_streaming:
                return handler
            guarded = self._guard(handler, method, is_users=user is not None)
            self._guarded[method] = guarded
        authorization = _header(handler_call_details.invocation_metadata, "authorization")
        try:
            if user is not None:
                await user(authorization)
            else:
                authenticate(self._identity, method, authorization)
        except Exception as error:  # noqa: BLE001  the edge: an unforeseen fault must reach the caller
            return self._refusal(method, error)
        return guarded

    def _refusal(self, method: str, error: Exception) -> Any:
        """Returns a handler that rejects a call without reading its request."""

        async def refuse(requests: Any, context: _Context) -> None:
            if isinstance(error, UnauthenticatedError):
                self._proxy.refuse(context.peer())
            await _refuse(context, method, error)

        return grpc.stream_unary_rpc_method_handler(refuse)

    def _guard(self, handler: Any, method: str, *, is_users: bool) -> Any:
        async def receive(requests: AsyncIterator[Any], context: _Context) -> Any:
            if self._identity.tls is not None and not is_users:
                names = context.auth_context().get("x509_subject_alternative_name", ())
                check_peer_certificate(method, names)
            if not method.startswith(HEALTH):
                self._proxy.admit(context.peer())
            request = await anext(requests, None)
            if request is None:
                raise InvalidArgumentError(
                    f"the message is not a valid request of {method}", method=method
                )
            headers.received(method, request)
            if not is_users:
                authorize(method, request)
            return request

        # Every request is received as a stream, because gRPC reads a unary request before it calls the
        # handler. The handler must first lift the limits of the connection, which a large request exceeds.
        if handler.response_streaming:
            wrapped = _guard_stream(handler.unary_stream, method, receive)
            factory: Any = grpc.stream_stream_rpc_method_handler
        else:
            wrapped = _guard_unary(handler.unary_unary, method, receive)
            factory = grpc.stream_unary_rpc_method_handler
        return factory(
            wrapped,
            request_deserializer=_or_none(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )


def _or_none(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Wraps a deserializer to return None for malformed messages, which gRPC reports as server failures."""

    def deserialized(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return None

    return deserialized


def _header(metadata: Any, name: str) -> str:
    for key, value in metadata or ():
        if key == name:
            return value if isinstance(value, str) else value.decode("latin-1")
    return ""


def _guard_unary(behavior: Any, method: str, receive: _Receive) -> Any:
    async def guarded(requests: Any, context: _Context) -> Any:
        with tracing.within(tracing.parse(_header(context.invocation_metadata(), "traceparent"))):
            try:
                request = await receive(requests, context)
                response = await behavior(request, context)
                headers.sent(method, response)
                return response
            except Exception as error:  # noqa: BLE001  the edge: an unforeseen fault must reach the caller
                await _refuse(context, method, error)

    return guarded


def _guard_stream(behavior: Any, method: str, receive: _Receive) -> Any:
    async def guarded(requests: Any, context: _Context) -> Any:
        try:
            request = await receive(requests, context)
            async for response in behavior(request, context):
                headers.sent(method, response)
                yield response
        except Exception as error:  # noqa: BLE001  the edge: an unforeseen fault must reach the caller
            await _refuse(context, method, error)

    return guarded


async def _refuse(context: _Context, method: str, error: Exception) -> None:
    """Ends a call with the status of an exception; logs unexpected exceptions."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    trace = (
        tracing.parse(_header(context.invocation_metadata(), "traceparent"))
        or tracing.uncollected_trace()
    )
    if not isinstance(error, ServiceError):
        with tracing.within(trace):
            logger.error("request failed", exc_info=error, extra={"method": method})
        error = InternalError(
            f"{method} failed with {type(error).__name__}: {error}; this is a bug in the service; its log "
            "has the traceback",
            method=method,
        )
    error.metadata.setdefault("trace_id", trace.trace_id)
    status = to_status(error)
    await context.abort(status.code, status.details, status.trailing_metadata)
