"""Tests of the ports of a controller that waits to lead."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from services.common.http.server import serve_http
from services.controller.standby import Standby, shown_address
from services.controller.store.database import Database
from services.controller.store.lease import Leadership, leader_address


@asynccontextmanager
async def answering(text: str, port: int = 0):
    """Serves connections that send a line and get it back after a text; yields the port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(text.encode() + b" " + line)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port)
    async with server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def standby_of(leader: list[str]):
    async def address() -> str:
        return leader[0]

    binds = {"rest_bind": "127.0.0.1:0", "grpc_bind": "127.0.0.1:0"}
    async with Standby.opened(address, host="127.0.0.1", **binds) as standby:
        yield standby


async def asked(port: int, line: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(line.encode() + b"\n")
    answer = (await reader.readline()).decode().strip()
    writer.close()
    return answer


async def test_connections_go_to_the_same_port_of_the_leader():
    async with answering("rest") as rest, answering("grpc") as grpc:
        leader = [shown_address("127.0.0.1", rest=rest, grpc=grpc)]
        async with standby_of(leader) as standby:
            assert await asked(standby.rest_port, "a") == "rest a"
            assert await asked(standby.grpc_port, "b") == "grpc b"


async def test_a_connection_waits_until_a_controller_leads():
    leader = [""]
    async with standby_of(leader) as standby:
        waiting = asyncio.create_task(asked(standby.rest_port, "a"))
        await asyncio.sleep(0)
        async with answering("later") as port:
            leader[0] = shown_address("127.0.0.1", rest=port, grpc=port)
            assert await waiting == "later a"


async def test_a_dead_leader_is_asked_for_again_until_another_one_leads():
    async with answering("dead") as dead:
        pass
    leader = [shown_address("127.0.0.1", rest=dead, grpc=dead)]
    async with standby_of(leader) as standby, answering("new") as port:
        waiting = asyncio.create_task(asked(standby.rest_port, "a"))
        await asyncio.sleep(0)
        leader[0] = shown_address("127.0.0.1", rest=port, grpc=port)
        assert await waiting == "new a"


async def test_who_leads_keeps_its_rest_port_and_serves_who_waited():
    async def app(scope, receive, send):
        headers = [(b"content-length", b"3")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"own"})

    async def got(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer.rpartition(b"\r\n\r\n")[2]

    async with standby_of([""]) as standby:
        before = [asyncio.create_task(got(standby.rest_port)) for _ in range(5)]
        await asyncio.sleep(0.05)
        standby.lead()
        # The port never refuses, also between the standby and the server.
        between = [asyncio.create_task(got(standby.rest_port)) for _ in range(5)]
        await asyncio.sleep(0.05)
        listener = standby.take_rest_listener()
        async with serve_http("", app, listener=listener, authenticates=False) as port:
            assert port == standby.rest_port
            answers = await asyncio.gather(*before, *between, got(port))
        assert {
            answer.split(b"\r\n")[1] if b"\r\n" in answer else answer for answer in answers
        } == {b"own"}
        async with answering("grpc", standby.grpc_port):  # the gRPC port is free
            assert await asked(standby.grpc_port, "a") == "grpc a"


async def test_connections_to_a_former_leader_end_when_this_one_leads():
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(answering("old"))
        standby = await stack.enter_async_context(
            standby_of([shown_address("127.0.0.1", rest=port, grpc=port)])
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", standby.rest_port)
        writer.write(b"a\n")
        assert await reader.readline() == b"old a\n"
        standby.lead()
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


async def test_the_lease_has_the_address_of_the_leader_only_while_it_leads(database, database_url):
    assert leader_address(database) == ""
    first = Leadership(database, holder="one", ttl_s=30, address="10.0.0.1 8080 50051")
    await first.acquire()
    assert leader_address(database) == "10.0.0.1 8080 50051"
    await first.release()
    assert leader_address(database) == ""
    other = Database(database_url)
    await Leadership(other, holder="two", ttl_s=30).acquire()
    assert leader_address(database) == ""
    other.close()


@pytest.mark.parametrize("address", ["", "10.0.0.1", "10.0.0.1 8080"])
async def test_an_address_that_is_not_whole_is_none(address):
    async with standby_of([address]) as standby:
        waiting = asyncio.create_task(asked(standby.rest_port, "a"))
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done
        waiting.cancel()


async def test_a_connection_ends_when_the_leader_ends_it_although_the_client_does_not():
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with standby_of([shown_address("127.0.0.1", rest=port, grpc=port)]) as standby:
            reader, writer = await asyncio.open_connection("127.0.0.1", standby.rest_port)
            writer.write(b"a\n")
            assert await reader.read() == b""
            await asyncio.wait_for(asyncio.gather(*standby._forwarding), 10)
            writer.close()


async def test_a_restarted_leader_does_not_forward_to_itself():
    leader = [""]
    async with standby_of(leader) as standby:
        leader[0] = shown_address("127.0.0.1", rest=standby.rest_port, grpc=standby.grpc_port)
        waiting = asyncio.create_task(asked(standby.rest_port, "a"))
        await asyncio.sleep(0.5)
        assert len(standby._forwarding) == 1
        async with answering("new") as port:
            leader[0] = shown_address("127.0.0.1", rest=port, grpc=port)
            assert await waiting == "new a"


async def test_a_takeover_logs_no_traceback_of_the_connections_that_it_ends(caplog):
    leader = [""]
    async with answering("old") as port, standby_of(leader) as standby:
        leader[0] = shown_address("127.0.0.1", rest=port, grpc=port)
        reader, writer = await asyncio.open_connection("127.0.0.1", standby.rest_port)
        writer.write(b"a\n")
        assert await reader.readline() == b"old a\n"
        standby.lead()
        assert await reader.read() == b""
        writer.close()
    assert caplog.text == ""
