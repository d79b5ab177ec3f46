"""A gRPC channel that outlives the certificate it was opened with.

gRPC binds a certificate to a channel: one whose certificate has ended cannot connect again. So each new
certificate gets a channel of its own, for the calls that begin from then on; those under way end on theirs,
which has no connection once the server finds it idle.
"""

from collections.abc import Callable
from typing import Any, Self

import grpc

from services.common.security.tls import Certificate, Tls

Open = Callable[[Certificate], grpc.aio.Channel]


class RenewedChannel:
    """What generated stubs use of a channel.

    Args:
        tls: Where the certificate comes from.
        open_channel: Opens a channel that shows a certificate.
    """

    def __init__(self, tls: Tls, open_channel: Open) -> None:
        self._tls = tls
        self._open = open_channel
        self._shown = tls.current()
        self._channels = [open_channel(self._shown)]

    def current(self) -> grpc.aio.Channel:
        """The channel of the newest certificate."""
        shown = self._tls.current()
        if shown is not self._shown:
            self._channels.append(self._open(shown))
            self._shown = shown
        return self._channels[-1]

    def unary_unary(self, method: str, *arguments: Any, **options: Any) -> "_Method":
        """A method that takes one message and returns one."""
        return _Method(self, "unary_unary", method, arguments, options)

    def unary_stream(self, method: str, *arguments: Any, **options: Any) -> "_Method":
        """A method that takes one message and returns a stream of them."""
        return _Method(self, "unary_stream", method, arguments, options)

    async def close(self, grace: float | None = None) -> None:
        """End all calls."""
        for channel in self._channels:
            await channel.close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


class _Method:
    """A method of whichever channel is current."""

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
        self._method = method.encode()  # as gRPC's own have it
        self._channel: grpc.aio.Channel | None = None
        self._bound: Any = None

    def __call__(self, request: Any, **options: Any) -> Any:
        channel = self._renewed.current()
        if channel is not self._channel:
            kind, method, arguments, bound = self._make
            self._bound = getattr(channel, kind)(method, *arguments, **bound)
            self._channel = channel
        return self._bound(request, **options)
