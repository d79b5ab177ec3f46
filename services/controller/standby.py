"""Ports of a controller that waits to lead: it forwards their connections to the leader.

::

    this one waits   accepts a connection, connects to the same port of the leader, copies bytes both ways
    none leads       accepted connections wait until a controller leads
    this one leads   REST keeps its listening socket, so no connection is refused; gRPC opens its own,
                     and workers connect again

TLS ends at the leader: all controllers of an installation have the same certificates.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final, Self

from services.common.admission import listen
from services.common.task_group import TaskGroup, unwrapped

logger = logging.getLogger(__name__)

_HOLD_S: Final = 30.0
"""Max seconds for which a connection waits for a leader."""
_RETRY_S: Final = 0.1
_CONNECT_TIMEOUT_S: Final = 2.0
_DRAIN_S: Final = 60.0
"""Max seconds for which a side may read nothing of what waits for it."""
_CHUNK_BYTES: Final = 1 << 16
_MAX_CONNECTIONS: Final = 2048
"""Max forwarded connections; further ones are closed."""

_ANY: Final = frozenset({"", "0.0.0.0", "[::]"})  # noqa: S104 -- compared with

Port = str
"""``rest`` or ``grpc``."""


def shown_address(host: str, *, rest: int, grpc: int) -> str:
    """Returns the text with which a leader announces where it serves."""
    return f"{host} {rest} {grpc}"


class Standby:
    """Forwards connections until this controller leads.

    Args:
        leader: Returns the address of the leader, as :func:`shown_address` writes it; empty if no
            controller leads.
        host: Host at which other controllers reach this one. An earlier process of this controller may
            still be named as the leader, and connections must not be forwarded in a circle.
    """

    def __init__(self, leader: Callable[[], Awaitable[str]], *, host: str) -> None:
        self._leader = leader
        self._host = host
        self._servers: dict[Port, asyncio.Server] = {}
        self._forwarding: set[asyncio.Task[None]] = set()
        self._connected: set[asyncio.Task[None]] = set()
        self._hosts: dict[Port, str] = {}
        self._own_addresses: dict[Port, tuple[str, int]] = {}
        self._rest_listener: socket.socket | None = None
        self.rest_port = 0
        self.grpc_port = 0

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, leader: Callable[[], Awaitable[str]], *, host: str, rest_bind: str, grpc_bind: str
    ) -> AsyncIterator[Self]:
        """Listens on both ports until the block ends.

        Raises:
            InvalidArgumentError: If an address cannot be bound.
        """
        standby = cls(leader, host=host)
        try:
            standby._rest_listener = await standby._listen("rest", rest_bind)
            standby.rest_port = standby._rest_listener.getsockname()[1]
            grpc_listener = await standby._listen("grpc", grpc_bind)
            standby.grpc_port = grpc_listener.getsockname()[1]
            grpc_listener.close()  # the server has a copy
            yield standby
        finally:
            standby._stop_accepting()
            for task in [*standby._forwarding]:
                task.cancel()
            await asyncio.gather(*standby._forwarding, return_exceptions=True)
            if standby._rest_listener is not None:
                standby._rest_listener.close()

    def take_rest_listener(self) -> socket.socket | None:
        """Returns the listening socket of the REST port, which the caller closes from now on."""
        listener, self._rest_listener = self._rest_listener, None
        return listener

    def lead(self) -> None:
        """Stops forwarding, because this controller leads; waiting connections go to its own servers.

        The gRPC port is free afterwards.
        """
        self._stop_accepting()
        self._own_addresses = {
            "rest": (self._hosts["rest"], self.rest_port),
            "grpc": (self._hosts["grpc"], self.grpc_port),
        }
        for task in [*self._connected]:  # the former leader answers no more
            task.cancel()

    def _stop_accepting(self) -> None:
        for server in self._servers.values():
            server.close()
        self._servers.clear()

    async def _listen(self, port: Port, bind: str) -> socket.socket:
        """Accepts connections on a copy of a listening socket, so that closing the copy keeps the port."""
        listener = listen(bind)
        host = bind.rpartition(":")[0]
        self._hosts[port] = "127.0.0.1" if host in _ANY else host.strip("[]")

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._forwarding.add(task)
            try:
                # asyncio would log the traceback of each cancelled connection.
                with suppress(asyncio.CancelledError):
                    await self._forward(port, reader, writer)
            finally:
                self._forwarding.discard(task)
                self._connected.discard(task)
                writer.close()

        self._servers[port] = await asyncio.start_server(accepted, sock=listener.dup())
        return listener

    async def _forward(
        self, port: Port, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if len(self._forwarding) > _MAX_CONNECTIONS:
            logger.warning("too many connections to forward", extra={"max": _MAX_CONNECTIONS})
            return
        try:
            async with asyncio.timeout(_HOLD_S):
                upstream = await self._connect(port)
        except TimeoutError:
            logger.warning("no controller leads", extra={"waited_s": _HOLD_S})
            return
        task = asyncio.current_task()
        if not self._own_addresses and task is not None:
            self._connected.add(task)
        try:
            await _copy_both(reader, upstream[1], upstream[0], writer)
        except OSError as error:
            logger.debug("a forwarded connection ended", extra={"cause": str(error)})
        finally:
            upstream[1].close()

    async def _connect(self, port: Port) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connects to the leader's port; waits while no controller leads."""
        while True:
            target = self._own_addresses.get(port) or _target(await self._leader(), port)
            if target is not None and (self._own_addresses or target != self._address(port)):
                with suppress(OSError, TimeoutError):
                    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                        return await asyncio.open_connection(*target)
            await asyncio.sleep(_RETRY_S)

    def _address(self, port: Port) -> tuple[str, int]:
        """Returns the address at which other controllers reach a port of this one."""
        return self._host, self.rest_port if port == "rest" else self.grpc_port


def _target(address: str, port: Port) -> tuple[str, int] | None:
    """Returns host and port of a leader's address; None if there is no leader."""
    fields = address.split(" ")
    if len(fields) != 3:
        return None
    host, rest, grpc = fields
    return host, int(rest if port == "rest" else grpc)


async def _copy_both(
    reader: asyncio.StreamReader,
    to_leader: asyncio.StreamWriter,
    from_leader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Copies bytes both ways until the leader ends its side, as the leader has the limits of connections."""
    with unwrapped(OSError):
        async with TaskGroup() as copying:
            sending = copying.create_task(_copy(reader, to_leader))
            await _copy(from_leader, writer)
            sending.cancel()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies bytes until the reader's side ends, and ends the writer's side then."""
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        async with asyncio.timeout(_DRAIN_S):
            await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
