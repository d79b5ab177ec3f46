"""Two controllers on PostgreSQL with one address: no further API call fails while the leader is replaced."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import httpx
import pytest

from services.common.runspec.loader import load_spec
from slipstream_client import AsyncClient
from tests.helpers.databases import postgres_cluster
from tests.helpers.ports import free_port
from tests.integration.test_two_controllers import TOKEN, announced, service

pytestmark = pytest.mark.timeout(300)
_CALLS = 1_000


class Service:
    """Spreads connections over the controllers that are its endpoints, as a Service of Kubernetes does."""

    def __init__(self, endpoints: list[str]) -> None:
        self.endpoints = endpoints
        self._turn = 0

    @asynccontextmanager
    async def serving(self, *ports: int) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for port in ports:
                accepted = partial(self._accepted, port)
                await stack.enter_async_context(
                    await asyncio.start_server(accepted, "127.0.0.1", port)
                )
            yield

    async def _accepted(
        self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._turn += 1
        with suppress(OSError, asyncio.CancelledError):
            host = self.endpoints[self._turn % len(self.endpoints)]
            upstream = await asyncio.open_connection(host, port)
            await asyncio.gather(self._copy(reader, upstream[1]), self._copy(upstream[0], writer))
        writer.close()

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()


@dataclass
class Caller:
    """Calls the API again and again, each time over a new connection."""

    address: str
    answered: int = 0
    failed: list[str] = field(default_factory=list)

    async def call_until(self, end: asyncio.Event) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=60, limits=limits, headers=headers) as client:
            while not (end.is_set() and self.answered >= _CALLS):
                try:
                    response = await client.get(f"{self.address}/v1/runs")
                    response.raise_for_status()
                except httpx.HTTPError as error:
                    self.failed.append(repr(error))
                else:
                    self.answered += 1


@pytest.fixture
def database_url():
    with postgres_cluster() as url:
        if url is None:
            reason = "PostgreSQL is not installed (apt-get install postgresql)"
            pytest.fail(reason) if os.getenv("CI") else pytest.skip(reason)
        yield url


HOSTS = {"one": "127.0.0.2", "two": "127.0.0.3"}


@pytest.mark.parametrize("how", ["terminated", "killed"])
async def test_only_calls_that_a_killed_leader_was_answering_fail(
    database_url, plumbing, tmp_path, how
):
    (tmp_path / "token").write_text(TOKEN)
    grpc, rest = free_port(), free_port()
    endpoints = Service([*HOSTS.values()])
    async with AsyncExitStack() as stack:
        ready_file = tmp_path / "queue.ready"
        queue = stack.enter_context(
            service(
                "services.transferqueue",
                tmp_path / "queue.log",
                ready_file=ready_file,
                snapshot_folder=tmp_path / "snapshots",
            )
        )
        shared = {
            "transferqueue_address": announced(ready_file, queue)["address"],
            "database_url": database_url,
            "lease_ttl_s": 3,
            "leave_runs": "true",
            "state_directory": tmp_path / "state",
            "admin_token_file": tmp_path / "token",
            "max_requests_per_second": 0,
            "advertise_host": "127.0.0.1",
        }
        processes = {}
        for name, host in HOSTS.items():
            settings_of_name = {
                "holder": name,
                "peer_host": host,
                "ready_file": tmp_path / f"{name}.ready",
            }
            binds = {"bind": f"{host}:{grpc}", "rest_bind": f"{host}:{rest}"}
            log = tmp_path / f"{name}.log"
            processes[name] = stack.enter_context(
                service("services.controller", log, **settings_of_name, **binds, **shared)
            )
            if name == "one":
                announced(settings_of_name["ready_file"], processes[name])
        await stack.enter_async_context(endpoints.serving(grpc, rest))
        address = f"http://127.0.0.1:{rest}"
        # The second one answers as soon as it listens, although it does not lead.
        while True:
            with suppress(OSError):
                (await asyncio.open_connection(HOSTS["two"], rest))[1].close()
                break
            await asyncio.sleep(0.1)
        async with AsyncClient(address, token=TOKEN, retry_s=60) as client:
            spec = load_spec(plumbing, ["trainer.steps=40"]).model_dump(mode="json")
            submitted = await client.submit(spec)
            assert not (tmp_path / "two.ready").exists()
            stop, caller = asyncio.Event(), Caller(address)
            calling = asyncio.create_task(caller.call_until(stop))
            async for event in submitted.follow():
                if event.type == "StepCommitted" and event.data["step"] == 5:
                    # The endpoint of an ending pod goes first.
                    endpoints.endpoints = [HOSTS["two"]]
                    if how == "terminated":
                        await asyncio.sleep(0.2)
                        processes["one"].terminate()
                    else:
                        processes["one"].kill()
            stop.set()
            await calling
            run = submitted.view
    # A killed leader takes the call with it that it was answering; the caller makes one at a time.
    assert len(caller.failed) <= (how == "killed"), caller.failed
    assert caller.answered >= _CALLS
    assert (run.state, run.step) == ("SUCCEEDED", 40), run.message
    assert (tmp_path / "two.ready").exists()
