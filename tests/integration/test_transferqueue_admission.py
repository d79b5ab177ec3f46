"""Admission of clients to the data plane."""

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any, cast

import zmq

from services.transferqueue.metrics import REJECTED
from services.transferqueue.storage.dataplane import ALL_RUNS, DataPlane

_HANDSHAKE_S = 0.3
"""Time that ZeroMQ's threads need for a handshake, up to the admission request."""


class _Clients:
    """Admits all clients; a second client requests admission while the first one is being answered."""

    def __init__(self) -> None:
        self.public_keys = asyncio.Queue[str]()
        self.on_first: Callable[[], None] | None = None

    async def admitted_as(self, public_key: str) -> str:
        self.public_keys.put_nowait(public_key)
        if self.on_first is not None:
            self.on_first()
            self.on_first = None
            time.sleep(_HANDSHAKE_S)  # noqa: ASYNC251 -- the loop must not see the second request alone
        return ALL_RUNS


async def test_concurrent_requests_are_answered() -> None:
    clients = _Clients()
    plane = DataPlane(cast("Any", None), cast("Any", None), clients)
    public_key, secret_key = zmq.curve_keypair()
    with zmq.Context() as context:
        async with plane.serve("127.0.0.1:0", secret_key=secret_key) as port:
            sockets: list[zmq.Socket[bytes]] = []

            def connect() -> None:
                own_public, own_secret = zmq.curve_keypair()
                socket = context.socket(zmq.DEALER)
                socket.linger = 0
                socket.curve_serverkey = public_key
                socket.curve_publickey, socket.curve_secretkey = own_public, own_secret
                socket.connect(f"tcp://127.0.0.1:{port}")
                sockets.append(socket)

            clients.on_first = connect
            connect()
            # ZeroMQ restarts a handshake after 30 s.
            async with asyncio.timeout(15):
                assert await clients.public_keys.get() != await clients.public_keys.get()
        context.destroy(linger=0)


async def test_a_client_without_encryption_is_refused_and_counted() -> None:
    plane = DataPlane(cast("Any", None), cast("Any", None), _Clients())
    _, secret_key = zmq.curve_keypair()
    counter = REJECTED.labels("data", "unauthenticated")
    num_refused = counter._value.get()
    with zmq.Context() as context:
        async with plane.serve("127.0.0.1:0", secret_key=secret_key) as port:
            socket = context.socket(zmq.DEALER)
            socket.connect(f"tcp://127.0.0.1:{port}")
            socket.send_multipart([b"garbage", b"more"], zmq.NOBLOCK)
            async with asyncio.timeout(15):
                while counter._value.get() == num_refused:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        context.destroy(linger=0)


_CURVE_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(47)


async def test_refused_clients_do_not_stall_the_data_plane_while_its_event_loop_is_busy() -> None:
    """More events than a queue of ZeroMQ takes by default wait for the loop."""
    plane = DataPlane(cast("Any", None), cast("Any", None), _Clients())
    is_stalled = False
    async with plane.serve("127.0.0.1:0", secret_key=None) as port:
        for _ in range(2500):
            with socket.create_connection(("127.0.0.1", port), timeout=15) as client:
                client.sendall(_CURVE_GREETING)
                try:
                    while client.recv(64):
                        pass
                except TimeoutError:
                    is_stalled = True
                    break
        await asyncio.sleep(
            0.5
        )  # reads the events, without which a stalled data plane cannot close
    assert not is_stalled
