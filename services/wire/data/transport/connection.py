"""Connection of a client to one shard."""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import zmq

from services.common.errors import (
    DeadlineExceededError,
    ServiceError,
    UnavailableError,
    from_reason,
)
from services.wire.data.channels.arena_socket import LocalChannel
from services.wire.data.channels.sockets import ClientSocket, Frame, set_limits
from services.wire.data.encoding import codec
from services.wire.transferqueue.types import Shard

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 30.0
"""Seconds without a connection after which the transferqueue counts as unreachable."""

Payload = list[memoryview]
Answer = tuple[codec.Response, Payload]


class Channel(Protocol):
    """Interface that carries messages to a shard and back."""

    def send(self, frames: Sequence[Frame]) -> None:
        """Queues a message."""

    def close(self) -> None:
        """Disconnects."""


@dataclass(frozen=True, slots=True)
class _Request:
    answer: asyncio.Future[Answer]
    take: Callable[[Payload], None] | None


class ShardConnection:
    """Sends requests to one shard; many can be pending at once."""

    _channel: Channel

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._pending: dict[int, _Request] = {}
        self._request_ids = count(1)
        self.is_open = True
        """True while requests can be sent."""
        self.is_connected = False
        """True while the shard can be reached, as far as is known."""
        self._connecting: asyncio.TimerHandle | None = None

    @classmethod
    def over_network(
        cls,
        context: zmq.Context[zmq.Socket[bytes]],
        shard: Shard,
        key_pair: tuple[bytes, bytes],
    ) -> "ShardConnection":
        """Connects through ZeroMQ.

        Args:
            context: ZeroMQ context of the client.
            key_pair: CURVE public and secret key of the client, in Z85.
        """
        socket = context.socket(zmq.DEALER)
        set_limits(socket, receive_queue=0)
        # Queued frames are views of the caller's memory, so an unbounded queue costs nothing.
        socket.setsockopt(zmq.SNDHWM, 0)
        if shard.public_key:
            socket.setsockopt(zmq.CURVE_SERVERKEY, shard.public_key.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, key_pair[0])
            socket.setsockopt(zmq.CURVE_SECRETKEY, key_pair[1])
        connection = cls(shard)
        connection._channel = ClientSocket(
            socket,
            lambda frames: connection._on_message([frame.buffer for frame in frames]),
            on_connected=connection._on_connected,
            on_lost=connection._on_lost,
        )
        socket.connect(shard.endpoint)
        connection._connecting = asyncio.get_running_loop().call_later(
            CONNECT_TIMEOUT_S, connection._on_lost
        )
        return connection

    @classmethod
    async def over_unix_socket(cls, shard: Shard, peer: socket.socket) -> "ShardConnection":
        """Uses a Unix socket that is already connected to the shard."""
        connection = cls(shard)
        _, connection._channel = await asyncio.get_running_loop().create_unix_connection(
            lambda: LocalChannel(connection._on_message, lambda is_refused: connection._fail()),
            sock=peer,
        )
        connection._on_connected()
        return connection

    def close(self) -> None:
        """Fails pending requests and disconnects."""
        self._channel.close()
        self._fail()

    def _on_connected(self) -> None:
        self.is_connected = True
        if self._connecting is not None:
            self._connecting.cancel()

    def _on_lost(self) -> None:
        self._fail()
        # The channel may be calling this method, so it is closed after the call.
        asyncio.get_running_loop().call_soon(self._channel.close)

    def _fail(self) -> None:
        self.is_open = self.is_connected = False
        if self._connecting is not None:
            self._connecting.cancel()
        for request in self._pending.values():
            if not request.answer.done():
                request.answer.set_exception(self._gone())

    def send_request(self, message: codec.Request, payload: Sequence[Frame] = ()) -> None:
        """Sends a message without waiting for its answer.

        Raises:
            UnavailableError: If the shard is gone.
        """
        if not self.is_open:
            raise self._gone()
        self._channel.send([codec.encode(message, 0), *payload])

    async def request(
        self,
        message: codec.Request,
        payload: Sequence[Frame] = (),
        *,
        timeout_s: float,
        take: Callable[[Payload], None] | None = None,
    ) -> Answer:
        """Sends a request and waits for its answer.

        Args:
            timeout_s: Max seconds to wait for the answer.
            take: Receives the payloads of all but the last part of the answer, as they arrive.

        Raises:
            ServiceError: The error that the shard reports.
            DeadlineExceededError: If it does not answer in time.
            UnavailableError: If the shard is gone.
        """
        if not self.is_open:
            raise self._gone()
        request_id = next(self._request_ids)
        waiter: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._pending[request_id] = _Request(waiter, take)
        try:
            self._channel.send([codec.encode(message, request_id), *payload])
            async with asyncio.timeout(timeout_s):
                answer, attached = await waiter
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"shard {self.shard.shard_id} at {self.shard.endpoint} did not respond to "
                f"{type(message).__name__} within {timeout_s} s; it is down or overloaded",
                shard_id=self.shard.shard_id,
            ) from error
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                # Only this task knows the answer, so release its pin here.
                self.release_pin(waiter.result()[0])
            raise
        finally:
            del self._pending[request_id]
        if isinstance(answer, codec.Failed):
            raise _error(answer)
        return answer, attached

    def abort(self, put_id: str) -> None:
        if self.is_open:
            self.send_request(codec.Abort(put_id))

    def _gone(self) -> UnavailableError:
        return UnavailableError(
            f"the connection to shard {self.shard.shard_id} at {self.shard.endpoint} broke; retry, and "
            "if the shard is gone, generate its samples again",
            shard_id=self.shard.shard_id,
        )

    def _on_message(self, frames: list[memoryview]) -> None:
        try:
            message, request_id = codec.decode(frames[0])
        except ValueError as error:
            logger.warning(
                "a shard sent an invalid message; closing the connection",
                extra={"shard_id": self.shard.shard_id, "error": str(error)},
            )
            self._on_lost()
            return
        request = self._pending.get(request_id)
        if request is None or request.answer.done() or not isinstance(message, codec.Response):
            self.release_pin(message)
        elif isinstance(message, codec.Data) and not message.is_last and request.take:
            request.take(frames[1:])
        else:
            request.answer.set_result((message, frames[1:]))

    def release_pin(self, message: codec.Message) -> None:
        if self.is_open and isinstance(message, codec.Located | codec.Data) and message.pin_id:
            self.send_request(codec.Unpin(message.pin_id))


def _error(failed: codec.Failed) -> ServiceError:
    details = dict(zip(failed.details[::2], failed.details[1::2], strict=True))
    return from_reason(failed.reason, failed.message, details)
