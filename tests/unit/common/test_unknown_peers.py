"""Connections of unknown peers that sent the most are ended; those of known ones stay, whatever they send."""

import asyncio
from contextlib import asynccontextmanager, suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.rpc import server
from services.common.rpc.server import serve
from services.common.security.credentials import Identity, acting_as
from services.common.security.run_tokens import SERVICES, issue_token
from services.common.unknown_peers import UnknownPeers
from slipstream.controller.v1 import membership_pb2, membership_pb2_grpc

KEY = b"k" * 32


@asynccontextmanager
async def sink():
    """A server that reads everything, and its port."""

    async def read(reader, writer):
        with suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass
        writer.close()

    server = await asyncio.start_server(read, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def connect(port: int, num_bytes: int):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(bytes(num_bytes))
    await writer.drain()
    return reader, writer


async def test_the_largest_is_ended_and_a_known_one_is_not():
    async with sink() as port, asyncio.timeout(20):
        peers = UnknownPeers(max_bytes=200_000)
        peers._port = port
        small, large, known = [await connect(port, n) for n in (1000, 250_000, 300_000)]
        address, own_port = known[1].get_extra_info("sockname")
        peers.know(f"ipv4:{address}:{own_port}")
        reading = asyncio.create_task(large[0].read())
        while not reading.done():
            peers.look()
            await asyncio.sleep(0)
        assert not small[0].at_eof() and not known[0].at_eof()
        for _, writer in (small, large, known):
            writer.close()


async def test_of_too_many_some_are_ended():
    async with sink() as port, asyncio.timeout(20):
        peers = UnknownPeers(max_connections=3)
        peers._port = port
        opened = [await connect(port, 1) for _ in range(8)]
        reading = [asyncio.create_task(reader.read()) for reader, _ in opened]
        while sum(task.done() for task in reading) < 5:
            peers.look()
            await asyncio.sleep(0)
        assert sum(task.done() for task in reading) == 5
        for task in reading:
            task.cancel()
        for _, writer in opened:
            writer.close()


class Membership(membership_pb2_grpc.MembershipServiceServicer):
    async def RegisterWorker(self, request, context):
        return membership_pb2.RegisterWorkerResponse(spec_json=request.worker_id)


@asynccontextmanager
async def served(monkeypatch, max_bytes: int):
    monkeypatch.setattr(server, "UnknownPeers", lambda: UnknownPeers(max_bytes=max_bytes))

    def register(server):
        membership_pb2_grpc.add_MembershipServiceServicer_to_server(Membership(), server)

    with acting_as(Identity(key=KEY)):
        async with serve("127.0.0.1:0", register) as port:
            yield port


async def test_a_known_caller_sends_more_than_strangers_may(monkeypatch):
    token = issue_token(KEY, SERVICES)
    async with (
        served(monkeypatch, 100_000) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = membership_pb2_grpc.MembershipServiceStub(channel)
        for size in (1, *[200_000] * 10):
            request = membership_pb2.RegisterWorkerRequest(run_id="run_1", worker_id="a" * size)
            answer = await stub.RegisterWorker(
                request, metadata=[("authorization", f"Bearer {token}")], timeout=20
            )
            assert len(answer.spec_json) == size


@pytest.mark.parametrize("is_health_asked", [False, True])
async def test_headers_of_a_call_without_end_are_ended(monkeypatch, is_health_asked):
    frame = (
        (4000).to_bytes(3)
        + b"\x09\x00\x00\x00\x00\x01"
        + b"\x00\x01a\x7f"
        + b"\x9a\x1e"
        + b"b" * 3994
    )
    async with served(monkeypatch, 100_000) as port, asyncio.timeout(20):
        if is_health_asked:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        writer.write(b"\x00\x00\x00\x01\x00\x00\x00\x00\x01")
        with suppress(ConnectionError):
            while True:
                writer.write(frame)
                await writer.drain()
                await asyncio.sleep(0)
                if reader.at_eof():
                    break
        with suppress(ConnectionError):
            await reader.read()
        writer.close()
