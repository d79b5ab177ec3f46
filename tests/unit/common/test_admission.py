"""Tests of the limits on connections before their peer has authenticated."""

import asyncio
import socket
from contextlib import asynccontextmanager, suppress

import grpc
import pytest
import zmq
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common import errors
from services.common.admission import MAX_REFUSALS, AdmissionProxy, private_socket
from services.common.rpc import server
from services.common.rpc.server import serve
from services.common.security.credentials import SERVICES, Identity, acting_as, issue_token
from slipstream.controller.v1 import membership_pb2, membership_pb2_grpc

KEY = b"k" * 32
LIMIT = 100_000


class Echo(asyncio.Protocol):
    """Echo server that records the received bytes by peer address."""

    def __init__(self, counts: dict[str, int]) -> None:
        self.num_bytes = counts

    def connection_made(self, transport):
        self.transport = transport
        self.peer = "unix-abstract:" + transport.get_extra_info("peername")[1:].decode()
        self.num_bytes[self.peer] = 0

    def data_received(self, data):
        self.num_bytes[self.peer] += len(data)
        self.transport.write(data)


@asynccontextmanager
async def proxied(counts: dict[str, int], **limits):
    """Yields a proxy in front of an echo server, and the proxy's port."""
    listener = socket.socket(socket.AF_UNIX)

    def listen_at(path):
        listener.bind(path)
        listener.listen()

    with private_socket(listen_at) as target:
        loop = asyncio.get_running_loop()
        async with await loop.create_unix_server(lambda: Echo(counts), sock=listener):
            proxy = AdmissionProxy(LIMIT, **limits)
            async with proxy.serve("127.0.0.1:0", target) as port:
                yield proxy, port


async def test_no_more_is_read_until_the_peer_is_admitted():
    bytes_by_peer: dict[str, int] = {}
    content = bytes(range(250)) * 4000
    async with asyncio.timeout(20), proxied(bytes_by_peer) as (proxy, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(content)
        received = await reader.readexactly(LIMIT)
        assert [*bytes_by_peer.values()] == [LIMIT]
        proxy.admit(next(iter(bytes_by_peer)))
        received += await reader.readexactly(len(content) - LIMIT)
        assert received == content
        writer.write(content)
        assert await reader.readexactly(len(content)) == content
        writer.close()


async def test_who_does_not_authenticate_in_time_is_ended():
    async with asyncio.timeout(20), proxied({}, deadline_s=0.05) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with suppress(ConnectionError):
            assert not await reader.read()
        writer.close()


async def test_the_oldest_of_too_many_is_ended_and_an_admitted_one_stays():
    bytes_by_peer: dict[str, int] = {}
    async with asyncio.timeout(20), proxied(bytes_by_peer, max_connections=3) as (proxy, port):
        opened = []
        for _ in range(8):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"a")
            await reader.readexactly(1)
            if not opened:
                proxy.admit(next(iter(bytes_by_peer)))
            opened.append((reader, writer))
        for reader, _ in opened[1:5]:
            with suppress(ConnectionError):
                assert not await reader.read()
        for reader, writer in (opened[0], *opened[5:]):
            writer.write(b"b")
            assert await reader.readexactly(1) == b"b"
            writer.close()


async def test_a_peer_that_was_refused_too_often_is_ended():
    bytes_by_peer: dict[str, int] = {}
    async with asyncio.timeout(20), proxied(bytes_by_peer) as (proxy, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"a")
        await reader.readexactly(1)
        for _ in range(MAX_REFUSALS):
            proxy.refuse(next(iter(bytes_by_peer)))
        writer.write(bytes(1000))
        with suppress(ConnectionError):
            assert not await reader.read()
        assert [*bytes_by_peer.values()] == [1]
        writer.close()


async def test_the_servers_own_words_admit():
    bytes_by_peer: dict[str, int] = {}
    async with asyncio.timeout(20), proxied(bytes_by_peer, admitting=b"READY") as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"..READY" + bytes(3 * LIMIT))
        assert len(await reader.readexactly(3 * LIMIT)) == 3 * LIMIT
        writer.close()


async def test_a_peer_that_does_not_read_holds_the_sender_back():
    async with asyncio.timeout(20), proxied({}, admitting=b"READY") as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"READY")
        await reader.readexactly(5)
        writer.write(bytes(32 << 20))
        draining = asyncio.ensure_future(writer.drain())
        assert len(await reader.readexactly(32 << 20)) == 32 << 20
        await draining
        writer.close()


async def test_a_port_in_use_is_an_invalid_argument():
    async with proxied({}) as (_, port):
        with pytest.raises(errors.InvalidArgumentError):
            async with AdmissionProxy(LIMIT).serve(f"127.0.0.1:{port}", ""):
                pass


class Membership(membership_pb2_grpc.MembershipServiceServicer):
    async def RegisterWorker(self, request, context):
        return membership_pb2.RegisterWorkerResponse(spec_json=request.worker_id)


@asynccontextmanager
async def served():
    def register(server):
        membership_pb2_grpc.add_MembershipServiceServicer_to_server(Membership(), server)

    with acting_as(Identity(key=KEY)):
        async with serve("127.0.0.1:0", register) as port:
            yield port


async def test_the_first_call_of_a_known_caller_may_be_large():
    token = issue_token(KEY, SERVICES)
    async with served() as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = membership_pb2_grpc.MembershipServiceStub(channel)
        for size in (3_000_000, 1):
            request = membership_pb2.RegisterWorkerRequest(run_id="run_1", worker_id="a" * size)
            answer = await stub.RegisterWorker(
                request, metadata=[("authorization", f"Bearer {token}")], timeout=20
            )
            assert len(answer.spec_json) == size


@pytest.mark.parametrize("is_health_asked", [False, True])
async def test_headers_of_a_call_without_end_are_ended(monkeypatch, is_health_asked):
    monkeypatch.setattr(
        server, "AdmissionProxy", lambda limit: AdmissionProxy(limit, deadline_s=1.0)
    )
    frame = (
        (4000).to_bytes(3)
        + b"\x09\x00\x00\x00\x00\x01"
        + b"\x00\x01a\x7f"
        + b"\x9a\x1e"
        + b"b" * 3994
    )
    async with served() as port, asyncio.timeout(20):
        if is_health_asked:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        writer.write(b"\x00\x00\x00\x01\x00\x00\x00\x00\x01" + frame * 200)
        with suppress(ConnectionError):
            await reader.read()
        writer.close()


async def test_a_zmq_client_without_a_key_is_ended(monkeypatch):
    from services.transferqueue.storage import dataplane

    monkeypatch.setattr(
        dataplane,
        "AdmissionProxy",
        lambda limit, **options: AdmissionProxy(limit, deadline_s=1.0, **options),
    )
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        _, secret = zmq.curve_keypair()
        async with asyncio.timeout(20), dataplane._bound(router, "127.0.0.1:0", secret) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15 + 32))
            await reader.readexactly(64)
            writer.write(b"\x06" + (8 << 20).to_bytes(8) + bytes(1 << 20))
            with suppress(ConnectionError):
                assert not await reader.read()
            writer.close()
