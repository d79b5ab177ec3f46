"""Tests of the metrics server: its address, its limits and its token."""

import asyncio
import threading

import httpx
import pytest

from services.common.admission import listen
from services.common.http import server
from services.common.http.server import serve_metrics


async def fetch(port: int, host: str = "127.0.0.1", **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.get(f"http://{host}:{port}/metrics", headers=headers)


def free_port() -> int:
    with listen("127.0.0.1:0") as listener:
        return listener.getsockname()[1]


async def test_they_are_on_the_host_that_the_process_is_bound_to():
    async with serve_metrics("127.0.0.2:50051", free_port()) as port:
        assert "python_info" in (await fetch(port, "127.0.0.2")).text
        with pytest.raises(httpx.ConnectError):
            await fetch(port, "127.0.0.1")


async def test_connections_take_no_threads_and_are_bounded():
    async with serve_metrics("127.0.0.1:0", free_port()) as port, asyncio.timeout(30):
        before = threading.active_count()
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        ended = [reader for reader, _ in opened[16:]]
        assert [await reader.read() for reader in ended] == [b""] * 24
        assert threading.active_count() <= before + 1
        for _, writer in opened:
            writer.close()


async def test_a_token_is_asked_for_if_there_is_one(tmp_path):
    file = tmp_path / "token"
    file.write_text("secret\n")
    async with serve_metrics("127.0.0.1:0", free_port(), token_file=file) as port:
        for header in ({}, {"Authorization": "Bearer other"}, {"Authorization": "secret"}):
            refused = await fetch(port, **header)
            assert (refused.status_code, refused.text) == (401, "")
        assert "python_info" in (await fetch(port, Authorization="Bearer secret")).text


async def test_concurrent_readers_cause_one_write(monkeypatch):
    written = []

    def generate(registry):
        written.append(registry)
        return b"text"

    monkeypatch.setattr(server, "generate_latest", generate)
    async with serve_metrics("127.0.0.1:0", free_port()) as port:
        answers = await asyncio.gather(*(fetch(port) for _ in range(10)))
    assert {answer.text for answer in answers} == {"text"}
    assert len(written) == 1


async def test_no_port_serves_nothing():
    async with serve_metrics("127.0.0.1:0", 0) as port:
        assert port == 0
