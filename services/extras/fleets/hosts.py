"""Hosts of one vLLM engine (``--nnodes``): what a server receives is copied to memory of the other ones.

Workers open received weights by the path of their memory, which only processes of the same host can open.
The first worker of each further host therefore keeps a copy, which it receives over a TCP connection to the
server while the engine decodes. Each piece is compared by its checksum.
"""

import asyncio
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from typing import Any, Final

import torch
from torch import Tensor

from services.common.task_group import gather_in_group
from services.extras.fleets.answers import RefusedError
from services.extras.fleets.staging import SharedMemory
from services.weightsync.checksum import write_checksum

logger = logging.getLogger(__name__)

JOIN_METHOD: Final = "join_engine_hosts"
_JOIN_TIMEOUT_S: Final = 60.0
_LEAST_S: Final = 30.0
_LEAST_RATE: Final = 20e6
"""Deadline of a piece on its way to another host: these seconds and the time of its bytes at this rate."""
_INTRODUCTION_S: Final = 5.0
"""Seconds within which a peer that has connected proves the secret and sends its first message."""
_PIECE_BYTES: Final = 256 << 20


def number_of_hosts(config: Any) -> int:
    """Returns the hosts of an engine by vLLM's configuration; versions without ``--nnodes`` have one."""
    return int(getattr(config.parallel_config, "nnodes_within_dp", 1))


def host_address() -> str:
    """Returns the address at which the engine's other hosts reach this one: vLLM's own (``VLLM_HOST_IP``)."""
    from vllm.utils.network_utils import get_ip  # only a server has vLLM

    return str(get_ip())


class EngineHosts:
    """The server's end: copies of its memory on the other hosts of its engine.

    Args:
        engine: vLLM's engine client.
        address: Returns this host's address for the others.
    """

    def __init__(self, engine: Any, *, address: Callable[[], str] = host_address) -> None:
        self._engine, self._address = engine, address
        self._links: dict[int, _HostLink] = {}
        self._joining = asyncio.Lock()

    @property
    def number(self) -> int:
        return number_of_hosts(self._engine.vllm_config)

    @classmethod
    def of(cls, state: Any) -> "EngineHosts":
        """Returns the hosts of the engine of vLLM's application.

        Args:
            state: State of the application.
        """
        hosts: EngineHosts | None = getattr(state, "slipstream_hosts", None)
        if hosts is None:
            hosts = state.slipstream_hosts = cls(state.engine_client)
        return hosts

    async def prepare(self, memory: SharedMemory) -> None:
        """Makes room on the other hosts for the server's memory; does nothing if there are none.

        Raises:
            RefusedError: If a host has no room, or does not answer in time.
        """
        if self.number == 1:
            return
        await self._join()
        memory.on_close = self._drop
        await gather_in_group([self._send(node, memory, 0, 0) for node in sorted(self._links)])

    async def copy(self, memory: SharedMemory, start: int, stop: int) -> None:
        """Copies bytes of memory that was prepared to the other hosts; does nothing if there are none.

        Raises:
            RefusedError: If a host does not have them in time.
        """
        if self.number == 1:
            return
        self._check(memory.path)
        for begin in range(start, stop, _PIECE_BYTES):
            end = min(begin + _PIECE_BYTES, stop)
            await gather_in_group(
                [self._send(node, memory, begin, end) for node in sorted(self._links)]
            )

    def described(self, description: str) -> str:
        """Returns a description of tensors for :func:`description_for`, on any host of the engine.

        Args:
            description: Result of ``StagedWeights.description`` for memory that was copied.

        Raises:
            RefusedError: If the connection to a host ended meanwhile.
        """
        if self.number == 1:
            return description
        described = json.loads(description)
        self._check(described["path"])
        hosts = {
            node: json.dumps({**described, "path": link.paths[described["path"]]})
            for node, link in self._links.items()
        }
        return json.dumps({"hosts": {0: description, **hosts}})

    def _check(self, path: str) -> None:
        """Refuses memory that was prepared before the hosts connected again: its copy ended meanwhile.

        Raises:
            RefusedError: If it is.
        """
        if not self._links or any(path not in link.paths for link in self._links.values()):
            raise RefusedError(
                409,
                "the connection to another host of the engine ended while weights arrived; announce the "
                "version again",
            )

    def close(self) -> None:
        """Ends the connections; the copies are freed."""
        links, self._links = self._links, {}
        for link in links.values():
            link.close()

    async def _send(self, node: int, memory: SharedMemory, start: int, stop: int) -> None:
        timeout_s = _LEAST_S + (stop - start) / _LEAST_RATE
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.to_thread(self._links[node].write, memory, start, stop)
        except (TimeoutError, OSError, EOFError, ValueError, RuntimeError) as error:
            self.close()
            raise RefusedError(
                500,
                f"host {node} of the engine did not receive {stop - start} bytes within {timeout_s:.0f} s: "
                f"{error or type(error).__name__}; look at the log of vLLM there",
            ) from error
        except asyncio.CancelledError:
            self.close()  # the thread ends, and no later piece gets its answer
            raise

    def _drop(self, path: str) -> None:
        for link in self._links.values():
            link.drop(path)

    async def _join(self) -> None:
        """Connects the other hosts, unless they are connected.

        Raises:
            RefusedError: If they do not connect in time.
        """
        async with self._joining:
            if self._links:
                return
            secret = secrets.token_bytes(32)
            connections: dict[int, Connection] = {}
            is_ended = threading.Event()
            listener = listener_for_hosts(self._address)
            accepting = asyncio.ensure_future(
                asyncio.to_thread(_accept, listener, secret, connections, self.number - 1, is_ended)
            )
            host, port = listener.address
            described = json.dumps({"host": host, "port": port, "secret": secret.hex()})
            try:
                async with asyncio.timeout(_JOIN_TIMEOUT_S):
                    await self._engine.collective_rpc(JOIN_METHOD, args=(described,))
                    await accepting
            except Exception as error:
                logger.exception("the engine's hosts did not connect")
                for line in [*connections.values()]:
                    shut_down(line)
                raise RefusedError(
                    422,
                    f"the engine's other hosts did not connect to {host}:{port} within "
                    f"{_JOIN_TIMEOUT_S:.0f} s ({error or type(error).__name__}); start vLLM on every host "
                    "with --worker-extension-cls services.extras.fleets.worker.FleetWorker, and let the "
                    "hosts reach each other's ports",
                ) from error
            finally:
                is_ended.set()
                wake_listener(listener)
                listener.close()
            self._links = {node: _HostLink(line) for node, line in connections.items()}


def _accept(
    listener: Listener,
    secret: bytes,
    connections: dict[int, Connection],
    count: int,
    is_ended: threading.Event,
) -> None:
    """Adds the connections of hosts by their number until there are enough."""
    while len(connections) < count and not is_ended.is_set():
        with suppress(AuthenticationError, EOFError, OSError, LookupError, ValueError):
            line, introduction = accepted(listener, secret)
            connections[int(introduction["node"])] = line


def listener_for_hosts(address: Callable[[], str]) -> Listener:
    """Returns a listener for workers of an engine's other hosts.

    Args:
        address: Returns this host's address for the others.

    Raises:
        RefusedError: If this host has no such address.
    """
    try:
        return Listener((address(), 0), family="AF_INET")
    except OSError as error:
        raise RefusedError(
            500,
            f"the engine's other hosts cannot reach this one: {error}; set VLLM_HOST_IP to this host's IPv4 "
            "address",
        ) from error


def accepted(listener: Listener, secret: bytes) -> tuple[Connection, dict[str, Any]]:
    """Returns a listener's next connection and its first message, a JSON object.

    A peer that connects and then says nothing, or too little, keeps the others out for some seconds.

    Raises:
        OSError: If the peer does not send them within these seconds, or the listener ends.
        AuthenticationError: If the peer does not know the secret.
    """
    line = listener.accept()
    limit = threading.Timer(_INTRODUCTION_S, shut_down, (line,))
    limit.daemon = True
    limit.start()
    try:
        deliver_challenge(line, secret)
        answer_challenge(line, secret)
        introduction: dict[str, Any] = json.loads(line.recv_bytes())
    except BaseException:
        limit.cancel()
        limit.join()  # it must not shut down a later file with the same number
        line.close()
        raise
    limit.cancel()
    return line, introduction


def shut_down(line: Connection) -> None:
    """Ends a connection and wakes the thread that reads from it, which closing alone would not."""
    with suppress(OSError), socket.socket(fileno=os.dup(line.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def wake_listener(listener: Listener) -> None:
    """Wakes the thread that waits for a listener's next connection, with an OSError."""
    listening: socket.socket = listener._listener._socket  # type: ignore[attr-defined]  # noqa: SLF001 -- no other way
    with suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)


class _HostLink:
    """Connection to the first worker of another host."""

    def __init__(self, line: Connection) -> None:
        self._line = line
        self._writing = threading.Lock()
        self.paths: dict[str, str] = {}
        """Path of the copy on that host, by the path of the server's memory."""
        self._unwanted: list[str] = []
        """Paths of memory that ended, of which the host does not know yet."""

    def write(self, memory: SharedMemory, start: int, stop: int) -> None:
        """Writes bytes into the copy, if any, and compares their checksums. Blocks.

        Raises:
            RuntimeError: If the host reports a failure.
            ValueError: If its bytes have another checksum.
            OSError: If the connection ends.
        """
        piece = memory.buffer[start:stop]
        order = {"path": memory.path, "size": memory.buffer.nbytes, "start": start, "stop": stop}
        with self._writing:
            self._send_drops()  # the system may give the path of freed memory to this one
            self._line.send_bytes(json.dumps(order).encode())
            if stop > start:
                self._line.send_bytes(piece.numpy().data)
            answer: dict[str, Any] = json.loads(self._line.recv_bytes())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        if answer["checksum"] != checksum_of(piece):
            raise ValueError("the bytes there have another checksum")
        self.paths[memory.path] = str(answer["path"])

    def drop(self, path: str) -> None:
        """Frees a copy."""
        if self.paths.pop(path, None) is not None:
            self._unwanted.append(path)
            threading.Thread(target=self._drop, daemon=True).start()

    def _drop(self) -> None:
        with suppress(OSError), self._writing:
            self._send_drops()

    def _send_drops(self) -> None:
        while self._unwanted:
            self._line.send_bytes(json.dumps({"drop": self._unwanted.pop(0)}).encode())

    def close(self) -> None:
        """Ends the connection; work that waits for the host fails."""
        shut_down(self._line)


class HostMemory:
    """The end on a further host of the engine: the copies of the server's memory.

    Args:
        described: JSON object with ``host``, ``port`` and ``secret`` of the server's listener.
        node: Number of this host.
    """

    def __init__(self, described: str, node: int) -> None:
        server = json.loads(described)
        self._server = (str(server["host"]), int(server["port"]))
        self._secret = bytes.fromhex(server["secret"])
        self._node = node
        self._copies: dict[str, SharedMemory] = {}
        threading.Thread(target=self._serve, name="engine-host", daemon=True).start()

    def _serve(self) -> None:
        """Receives pieces until the server ends the connection."""
        try:
            with Client(self._server, family="AF_INET", authkey=self._secret) as line:
                line.send_bytes(json.dumps({"node": self._node}).encode())
                with suppress(EOFError, ConnectionError):
                    while True:
                        order = json.loads(line.recv_bytes())
                        if "drop" in order:
                            self._free(order["drop"])
                        else:
                            line.send_bytes(json.dumps(self._receive(line, order)).encode())
        except Exception:
            logger.exception("this host receives no weights", extra={"server": self._server})
        finally:
            for path in [*self._copies]:
                self._free(path)

    def _receive(self, line: Connection, order: Mapping[str, Any]) -> dict[str, Any]:
        path, size = str(order["path"]), int(order["size"])
        start, stop = int(order["start"]), int(order["stop"])
        copy = self._copies.get(path)
        if copy is None or copy.buffer.nbytes != size:
            self._free(path)
            try:
                copy = self._copies[path] = SharedMemory(size)
            except (OSError, RuntimeError) as error:
                return {"error": f"no memory for {size} bytes: {error}"}
        piece = copy.buffer[start:stop]
        if stop > start:
            line.recv_bytes_into(piece.numpy().data)
        return {"path": copy.path, "checksum": checksum_of(piece)}

    def _free(self, path: str) -> None:
        copy = self._copies.pop(path, None)
        if copy is not None:
            copy.close()


def checksum_of(piece: Tensor) -> list[int]:
    """Returns the checksum of bytes, ``[n]`` uint8."""
    sums = torch.zeros(2, dtype=torch.int64)
    write_checksum(piece, sums)
    return [int(value) for value in sums]


def description_for(description: str, node: int) -> str:
    """Returns what ``open_shared`` takes on one host.

    Args:
        description: Result of :meth:`EngineHosts.described`.
        node: Number of the host.
    """
    hosts = json.loads(description).get("hosts")
    return description if hosts is None else str(hosts[str(node)])
