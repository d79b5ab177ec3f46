"""HTTP client connections under concurrent requests: reuse, expiry, and broken or cancelled connections."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from services.common.http import connections
from services.common.http.connections import ReusedConnections
from tests.helpers.engines import until

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


class Server:
    """Server that answers requests while ``may_answer`` is set, and counts connections."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.num_open = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.writers = set[asyncio.StreamWriter]()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_begun += 1
        self.num_open += 1
        self.writers.add(writer)
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await self.may_answer.wait()
                writer.write(ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.num_open -= 1
            writer.close()


@pytest.fixture
async def server() -> Server:
    return Server()


@pytest.fixture
async def client(server, tmp_path) -> AsyncIterator[httpx.AsyncClient]:
    path = str(tmp_path / "socket")
    transport = ReusedConnections(uds=path)
    async with (
        await asyncio.start_unix_server(server.serve, path),
        httpx.AsyncClient(transport=transport, base_url="http://here", timeout=5) as client,
    ):
        yield client


async def ask(client: httpx.AsyncClient) -> str:
    return (await client.get("/")).text


async def test_concurrent_requests_have_a_connection_each_and_later_ones_reuse_them(server, client):
    server.may_answer.clear()
    asking = [asyncio.create_task(ask(client)) for _ in range(40)]
    await until(lambda: server.num_begun == 40)
    server.may_answer.set()
    assert await asyncio.gather(*asking) == ["hi"] * 40
    assert [await ask(client) for _ in range(5)] == ["hi"] * 5
    await asyncio.gather(*(ask(client) for _ in range(40)))
    assert server.num_begun == 40


async def test_idle_connections_expire(server, client, monkeypatch):
    monkeypatch.setattr(connections, "_KEEPALIVE_S", 0.1)
    await asyncio.gather(*(ask(client) for _ in range(10)))
    await asyncio.sleep(0.2)
    await ask(client)
    async with asyncio.timeout(5):
        await until(lambda: server.num_open == 1)
    assert await ask(client) == "hi"


async def test_a_connection_that_the_server_closed_is_replaced(server, client):
    await ask(client)
    for writer in server.writers:
        writer.close()
    await asyncio.sleep(0.05)
    assert await ask(client) == "hi"
    assert server.num_begun == 2


async def test_a_cancelled_request_leaves_no_connection_that_answers_the_next_one(server, client):
    server.may_answer.clear()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await ask(client)
    server.may_answer.set()
    assert await ask(client) == "hi"
    assert server.num_begun == 2


async def test_closing_the_client_closes_idle_connections(server, client):
    await asyncio.gather(*(ask(client) for _ in range(3)))
    await client.aclose()
    async with asyncio.timeout(5):
        await until(lambda: server.num_open == 0)


async def test_a_response_whose_end_was_interrupted_delays_no_later_request(server, client):
    """A task may be cancelled while it closes its response, whose connection then still counts as used."""

    async def interrupted() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        async with client.stream("GET", "/") as response:
            response.stream._stream._body.aclose = interrupted
    assert await ask(client) == "hi"
    assert server.num_begun == 2
