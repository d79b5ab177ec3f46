"""Connections of a client to all shards, which follow changes of the shards."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import zmq

from services.common.errors import FailedPreconditionError, NotFoundError, UnavailableError
from services.common.task_group import TaskGroup, unwrapped
from services.wire.data.channels.arena_socket import open_arena
from services.wire.data.channels.sockets import keep_freed_memory
from services.wire.data.transport.arena_transport import ArenaTransport
from services.wire.data.transport.connection import CONNECT_TIMEOUT_S, ShardConnection
from services.wire.data.transport.socket_transport import SocketTransport, Transport
from services.wire.transferqueue.client import TransferQueueClient
from services.wire.transferqueue.types import Shard

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Seconds between two attempts to connect."""
_PROBE_S = 2.0


@dataclass(frozen=True, slots=True)
class Link:
    """Connection to one shard with its transport."""

    connection: ShardConnection
    transport: Transport


class Links:
    """Connections to the index and all shards, which are opened again when they break; see ``opened``.

    Args:
        address: ``host:port`` of the index.
        use_shared_memory: Use the memory of shards on this host directly.
    """

    def __init__(self, address: str, *, use_shared_memory: bool) -> None:
        self._address = address
        self._use_shared_memory = use_shared_memory
        self._lost: dict[str, float] = {}
        """Monotonic time in seconds at which each lost connection was lost, by endpoint."""
        self._key_pair = zmq.curve_keypair()
        self._links: dict[str, Link] = {}
        self._shards: tuple[Shard, ...] = ()
        self._changing = asyncio.Lock()

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self._shards

    def outage(self) -> str:
        """Returns a message with the address and duration of the longest outage; empty if there is none."""
        if not self._lost:
            return ""
        endpoint, since = min(self._lost.items(), key=lambda item: item[1])
        where = (
            self._address if endpoint == self._address else f"{self._address}, shard {endpoint},"
        )
        return f"the transferqueue at {where} has been unreachable for {time.monotonic() - since:.0f} s"

    @property
    def outage_s(self) -> float:
        """Seconds since the first of the lost connections was lost; 0 if all are open."""
        return time.monotonic() - min(self._lost.values()) if self._lost else 0.0

    async def to(self, shard_id: str) -> Link:
        """Returns the link to a shard; reopens a broken one.

        Raises:
            NotFoundError: If the shard is gone with all its data; a retry is useless.
            UnavailableError: If it does not answer, but may be alive.
        """
        link = self._links.get(shard_id)
        if link is not None and not link.connection.is_open:
            link = await self._reopen(shard_id)
            if link is None and shard_id in self._links:
                raise UnavailableError(f"shard {shard_id} does not respond", shard_id=shard_id)
        if link is None:
            raise NotFoundError(
                f"shard {shard_id} is gone and its samples are lost; generate them again",
                shard_id=shard_id,
            )
        return link

    @asynccontextmanager
    async def opened(self, metadata: TransferQueueClient) -> AsyncIterator[None]:
        """Connects to the shards and follows their changes until the block ends.

        Raises:
            UnavailableError: If the index does not answer in time.
        """
        self._context = zmq.Context()
        connected = asyncio.Event()
        try:
            with unwrapped():
                async with TaskGroup() as tasks:
                    background = [
                        tasks.create_task(self._follow(metadata, connected)),
                        tasks.create_task(self._reopen_lost()),
                    ]
                    try:
                        async with asyncio.timeout(CONNECT_TIMEOUT_S):
                            await connected.wait()
                    except TimeoutError:
                        raise UnavailableError(
                            f"the transferqueue at {self._address} did not answer within "
                            f"{CONNECT_TIMEOUT_S:.0f} s"
                        ) from None
                    yield
                    for task in background:
                        task.cancel()
        finally:
            await self._update(())
            self._context.destroy(linger=0)

    async def _follow(self, metadata: TransferQueueClient, connected: asyncio.Event) -> None:
        is_known_to_be_away = False
        while True:
            try:
                async for shards in metadata.connect_client(self._key_pair[0].decode()):
                    await self._update(shards)
                    connected.set()
                    self._lost.pop(self._address, None)
                    is_known_to_be_away = False
            except (UnavailableError, FailedPreconditionError) as error:
                if not is_known_to_be_away:
                    logger.warning("the index is unreachable", extra={"error": str(error)})
                is_known_to_be_away = True
            self._lost.setdefault(self._address, time.monotonic())
            await asyncio.sleep(RETRY_S)

    async def _reopen_lost(self) -> None:
        """Opens lost connections to shards again, and records since when they are lost."""
        while True:
            await asyncio.sleep(RETRY_S)
            links = dict(self._links)
            for shard_id, link in links.items():
                if link.connection.is_connected:
                    self._lost.pop(link.connection.shard.endpoint, None)
                    continue
                self._lost.setdefault(link.connection.shard.endpoint, time.monotonic())
                if not link.connection.is_open:
                    await self._reopen(shard_id)
            endpoints = {link.connection.shard.endpoint for link in self._links.values()}
            for endpoint in self._lost.keys() - endpoints - {self._address}:
                del self._lost[endpoint]

    async def _reopen(self, shard_id: str) -> Link | None:
        async with self._changing:
            link = self._links.get(shard_id)
            if link is None or link.connection.is_open:
                return link
            shard = link.connection.shard
            reopened = await self._open_local(shard)
            if reopened is None and await _listens(shard.endpoint):
                logger.warning(
                    "the connection to a shard broke; connecting over the network",
                    extra={"shard_id": shard_id, "endpoint": shard.endpoint},
                )
                reopened = await self._open_network(shard)
            if reopened is not None:
                self._links[shard_id] = reopened
            return reopened

    async def _update(self, shards: Sequence[Shard]) -> None:
        async with self._changing:
            await self._connect_to(shards)
            self._shards = tuple(shards)

    async def _connect_to(self, shards: Sequence[Shard]) -> None:
        instances = {shard.shard_id: shard.instance_id for shard in shards}
        for shard_id, link in list(self._links.items()):
            if instances.get(shard_id) != link.connection.shard.instance_id:
                link.connection.close()
                del self._links[shard_id]
        for shard in shards:
            if shard.shard_id not in self._links:
                local = await self._open_local(shard)
                self._links[shard.shard_id] = local or await self._open_network(shard)

    async def _open_local(self, shard: Shard) -> Link | None:
        if not self._use_shared_memory or not shard.arena_socket:
            return None
        opened = await asyncio.to_thread(
            open_arena, shard.arena_socket, instance_id=shard.instance_id
        )
        if opened is None:
            return None
        memory, peer = opened
        connection = await ShardConnection.over_unix_socket(shard, peer)
        sockets = SocketTransport(connection)
        return Link(connection, ArenaTransport(connection, memory, sockets))

    async def _open_network(self, shard: Shard) -> Link:
        connection = ShardConnection.over_network(self._context, shard, self._key_pair)
        keep_freed_memory()
        return Link(connection, SocketTransport(connection))


async def _listens(endpoint: str) -> bool:
    """Returns True if a process listens at ``tcp://host:port``; ZeroMQ would wait for one to appear."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        async with asyncio.timeout(_PROBE_S):
            _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        # Includes a time-out: the shard may be gone with its host.
        return False
    writer.close()
    return True
