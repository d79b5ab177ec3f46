"""A router is asked for its servers; a balancer that hides them is refused with the key that lists them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from services.extras.external_engine.engine import EngineDiedError
from services.extras.fleets import fleet as fleet_module
from services.extras.fleets.client import ServerRefusedError
from services.extras.fleets.engine import FleetEngine
from services.extras.fleets.protocol import API
from services.extras.fleets.routers import parse_servers
from services.extras.fleets.vllm_server import VllmServer, build
from services.rollout.calls.outside import AddressPolicy
from tests.helpers.engines import request, running, until
from tests.unit.extras.fleets.servers import LOCAL, TOKEN, engine_config, router, serving
from tests.unit.extras.fleets.test_fleet import _adopt, _allow


@pytest.fixture(autouse=True)
def fast_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_PROBE_EVERY_S", 0.05)


@asynccontextmanager
async def _behind(address: str, events: list[str]) -> AsyncIterator[FleetEngine]:
    config = engine_config([], events, arguments={"addresses": [address], "token": TOKEN})
    engine = build(config)
    async with running(engine), asyncio.timeout(30):
        yield engine


@pytest.mark.parametrize("path", ["/workers", "/list_workers"])
async def test_servers_behind_a_router_come_and_go(path: str) -> None:
    events: list[str] = []
    async with (
        serving(2) as servers,
        router([servers[0].address], path) as (address, listed),
        _behind(address, events) as engine,
    ):
        fleet = engine.backend.fleet
        await _adopt(engine, 1, 0.5)
        assert [server.address for server in fleet.serving] == [servers[0].address]
        listed.append(servers[1].address)
        await until(lambda: len(fleet.serving) == 2, poll_s=0.005)
        listed.remove(servers[0].address)
        await until(lambda: len(fleet.serving) == 1, poll_s=0.005)
        _allow(servers, 9)
        result = await engine.generate(request("r", (1, 2), max_tokens=3))
        assert result.logprobs == (-0.5,) * 3
        assert not servers[0].engine.requests
    kinds = [event.partition(":")[0] for event in events]
    assert kinds == ["EngineRouterListed"] * 3 + ["EngineServerLost"]
    assert events[-1].endswith("its router no longer lists it")


async def test_a_router_that_passes_other_paths_on_is_asked_first() -> None:
    async with (
        serving() as (server,),
        router([server.address], passes_on=True) as (address, _),
        _behind(address, []) as engine,
    ):
        await _adopt(engine, 1, 0.5)
        (client,) = engine.backend.fleet.serving
        assert client.address == server.address


async def test_a_router_that_fails_is_asked_again() -> None:
    events: list[str] = []
    async with (
        serving(2) as servers,
        router([servers[0].address]) as (address, listed),
        _behind(address, events) as engine,
    ):
        fleet = engine.backend.fleet
        await _adopt(engine, 1, 0.5)
        listed.clear()
        await until(lambda: any("503 to GET /workers" in event for event in events), poll_s=0.005)
        assert [server.address for server in fleet.serving] == [servers[0].address]
        listed += [server.address for server in servers]
        await until(lambda: len(fleet.serving) == 2, poll_s=0.005)


async def test_a_router_that_starts_after_the_run_is_asked_for_its_servers() -> None:
    events: list[str] = []
    async with (
        serving() as (server,),
        router([]) as (address, listed),
        _behind(address, events) as engine,
    ):
        await until(lambda: bool(events), poll_s=0.005)
        listed.append(server.address)
        await _adopt(engine, 1, 0.5)
        assert [serving_server.address for serving_server in engine.backend.fleet.serving] == [
            server.address
        ]


async def test_a_server_that_leaves_while_it_receives_weights_ends_no_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        serving(2) as servers,
        router([server.address for server in servers]) as (address, listed),
        _behind(address, []) as engine,
    ):
        fleet = engine.backend.fleet
        await _adopt(engine, 1, 0.5)
        await until(lambda: len(fleet.serving) == 2, poll_s=0.005)
        sends, has_left = asyncio.Event(), asyncio.Event()
        send = VllmServer._send

        async def wait(server: VllmServer, *arguments: Any) -> None:
            if server.address == servers[0].address:
                sends.set()
                await has_left.wait()
            await send(server, *arguments)

        monkeypatch.setattr(VllmServer, "_send", wait)
        adopting = asyncio.ensure_future(_adopt(engine, 2, 0.75))
        await sends.wait()
        (lost_server,) = [
            candidate for candidate in fleet._servers if candidate.address == servers[0].address
        ]
        listed.remove(lost_server.address)
        await until(lambda: lost_server._is_closed, poll_s=0.005)
        has_left.set()
        await adopting
        assert [candidate.address for candidate in fleet.serving] == [servers[1].address]


async def test_the_token_goes_to_no_host_that_only_a_router_names() -> None:
    async with router(["http://127.0.0.2:1"]) as (address, _):
        config = engine_config([], [], arguments={"addresses": [address], "token": TOKEN})
        with pytest.raises(EngineDiedError, match=r"127\.0\.0\.2:1, whose host is neither"):
            await build(config).run()
        allowed = replace(config, reach=AddressPolicy(("127.0.0.1", "127.0.0.2")))
        engine = build(allowed)
        async with running(engine), asyncio.timeout(10):
            await until(lambda: len(engine.backend.fleet._servers) == 2, poll_s=0.005)


async def test_what_lists_no_servers_is_refused_with_the_key() -> None:
    async with router([], "/other") as (address, _):
        config = engine_config([], [], arguments={"addresses": [address], "token": TOKEN})
        with pytest.raises(EngineDiedError, match=r"list its servers in .*\.addresses"):
            await build(config).run()


async def test_a_balancer_in_front_of_several_servers_is_found_out() -> None:
    instances = ["a", "b", "a"]

    def answer(_: httpx.Request) -> httpx.Response:
        state = {"api": API, "session": "s", "engine": {}, "instance": instances.pop(0)}
        return httpx.Response(200, json=state)

    client = VllmServer(
        "http://127.0.0.1:1", owner="a", reach=LOCAL, transport=httpx.MockTransport(answer)
    )
    await client.attach()
    await client.attach()  # it was restarted
    with pytest.raises(ServerRefusedError, match="several servers answer at"):
        await client.attach()
    await client.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([], "malformed"),
        ({"urls": 3}, "malformed"),
        ({"workers": [{"url": "http://a:1", "worker_type": "prefill"}]}, "as prefill"),
        ({"urls": ["http://a:1@0"]}, "not http://HOST:PORT"),
        ({"urls": ["grpc://a:1"]}, "not http://HOST:PORT"),
    ],
)
def test_lists_that_a_fleet_cannot_use_are_refused(answer: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_servers(json.dumps(answer).encode())


def test_a_server_is_listed_once() -> None:
    assert parse_servers(b'{"urls": ["http://a:1/", "http://a:1"]}') == ["http://a:1"]
