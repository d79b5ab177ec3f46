"""gRPC channel that outlives the certificate it was opened with.

gRPC binds a certificate to a channel: after the certificate has expired, the channel cannot
reconnect. So each new certificate gets a new channel for later calls; running calls end on the old
one, whose connection the server closes when it is idle.
"""

from collections.abc import Callable
from typing import Any, Self

import grpc

from services.common.security.tls import Certificate, Tls

Open = Callable[[Certificate], grpc.aio.Channel]


class RenewedChannel:
    """Channel with the methods that generated stubs use.

    Args:
        tls: Source of the certificate.
        open_channel: Opens a channel with a certificate.
    """

    def __init__(self, tls: Tls, open_channel: Open) -> None:
        self._tls = tls
        self._open = open_channel
        self._shown = tls.current()
        self._channels = [open_channel(self._shown)]

    def current(self) -> grpc.aio.Channel:
        """Returns the channel with the newest certificate."""
        shown = self._tls.current()
        if shown is not self._shown:
            self._channels.append(self._open(shown))
            self._shown = shown
        return self._channels[-1]

    def unary_unary(self, method: str, *arguments: Any, **options: Any) -> "_Method":
        """Returns a callable for a method with one request and one response."""
        return _Method(self, "unary_unary", method, arguments, options)

    def unary_stream(self, method: str, *arguments: Any, **options: Any) -> "_Method":
        """Returns a callable for a method with one request and a response stream."""
        return _Method(self, "unary_stream", method, arguments, options)

    async def close(self, grace: float | None = None) -> None:
        """Closes all channels and ends their calls."""
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
