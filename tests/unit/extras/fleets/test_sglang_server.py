"""An SGLang server gets work only under a weight version that this session set, and no other token counts."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from services.extras.external_engine.engine import EngineDiedError
from services.extras.fleets import client as client_module
from services.extras.fleets import fleet as fleet_module
from services.extras.fleets import sglang_server as module
from services.extras.fleets.client import ServerAwayError, ServerBusyError, ServerRefusedError
from services.extras.fleets.engine import FleetEngine
from services.extras.fleets.labels import Label
from services.extras.fleets.sglang_server import SglangServer, build
from services.rollout.engines.base import GenerationResult
from tests.helpers.engines import request, running, until
from tests.unit.extras.fleets.servers import LOCAL, TOKEN, engine_config, fleet_weights
from tests.unit.extras.fleets.sglang_servers import SglangFake
from tests.unit.extras.fleets.test_fleet import _adopt, _value


@pytest.fixture(autouse=True)
def fast_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_PROBE_EVERY_S", 0.05)
    monkeypatch.setattr(fleet_module, "_OVERLOAD_DELAYS_S", (0.01, 0.02))


@asynccontextmanager
async def _serving(number: int = 1) -> AsyncIterator[list[SglangFake]]:
    async with AsyncExitStack() as stack:
        servers = [SglangFake() for _ in range(number)]
        for server in servers:
            await server.start()
            stack.push_async_callback(server.close)
        yield servers


@asynccontextmanager
async def _engine(servers: list[SglangFake], events: list[str]) -> AsyncIterator[FleetEngine]:
    engine = build(engine_config([], events, arguments=_arguments(servers)))
    async with running(engine), asyncio.timeout(600):
        await until(lambda: len(engine.backend.fleet.attached) == len(servers), poll_s=0.005)
        yield engine


def _arguments(servers: list[SglangFake]) -> dict[str, Any]:
    return {"addresses": [server.address for server in servers], "token": TOKEN}


def _client(server: SglangFake, owner: str = "run/rollout-0") -> SglangServer:
    return SglangServer(server.address, owner=owner, reach=LOCAL, token=TOKEN)


def test_a_label_names_an_owner_of_any_characters() -> None:
    label = Label(owner="run:a/b c", session="s", version="3", beat=4)
    assert Label.parse(str(label)) == label
    for text in ("default", "", None, "slipstream:a:b:c", "slipstream:a:b:c:d"):
        assert Label.parse(text) is None


async def test_weights_change_only_in_a_pause_under_the_label_of_no_version() -> None:
    async with _serving() as (server,):
        client = _client(server)
        await client.attach()
        weights = fleet_weights(4, 0.5)
        await client.upload(weights)
        await client.load(weights)
        assert server.sglang.calls == [
            "/update_weight_version",
            "/continue_generation",
            "/pause_generation",
            "/update_weight_version",
            "/begin_weight_update",
            "/update_weights_from_tensor",
            "/end_weight_update",
            "/weights_checker",
            "/flush_cache",
            "/update_weight_version",
            "/continue_generation",
        ]
        versions = [Label.parse(text).version for text in server.sglang.labels]
        assert versions == ["none", "loading", "4"]
        assert client.serves(weights)
        await client.check()
        assert await client.score((1, 2, 3)) == (-0.5, -0.5)
        await client.close()
        assert server.sglang.label == "none"


async def test_a_server_that_restarts_gets_no_work_before_it_has_the_weights() -> None:
    events: list[str] = []
    async with _serving() as (server,), _engine([server], events) as engine:
        await _adopt(engine, 1, 0.5)
        await server.restart()
        result = await engine.generate(request("r", (1, 2), max_tokens=3))
        assert result.version_runs == ((1, 3),)
        assert result.logprobs == (-0.5,) * 3
    assert [event.partition(":")[0] for event in events] == [
        "EngineServerLost",
        "EngineServerServes",
    ]


async def test_a_server_that_was_asked_to_end_gets_no_further_work() -> None:
    events: list[str] = []
    async with _serving(2) as servers, _engine(servers, events) as engine:
        await _adopt(engine, 1, 0.5)
        task = asyncio.ensure_future(engine.generate(request("r", (1, 2), max_tokens=500)))
        await until(lambda: engine.stats().tokens_total > 5)
        (used,) = [server for server in engine.backend.fleet.serving if server.num_running]
        (ending,) = [server for server in servers if server.address == used.address]
        ending.sglang.is_ending = True
        result = await task
        assert (len(result.token_ids), result.version_runs) == (500, ((1, 500),))
        await _adopt(engine, 2, 0.25)
        assert ending.address not in {server.address for server in engine.backend.fleet.attached}
        await ending.restart()
        await until(lambda: len(engine.backend.fleet.serving) == 2, poll_s=0.005)
        assert ending.sglang.bias == 0.25
    lost, serves = events
    assert lost.startswith(f"EngineServerLost: {ending.address} gets no work")
    assert "was asked to end" in lost
    assert serves == f"EngineServerServes: {ending.address} serves version 2"


async def test_a_server_whose_engine_is_slow_keeps_its_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(client_module.FleetServer.send.__kwdefaults__, "timeout_s", 0.2)
    async with _serving() as (server,):
        client = _client(server)
        await client.attach()
        server.sglang.is_slow = True
        await client.check()
        server.sglang.is_slow, server.sglang.is_ending = False, True
        with pytest.raises(ServerAwayError, match="was asked to end"):
            await client.check()


async def test_an_owner_attaches_to_a_server_that_the_owner_before_left_paused() -> None:
    async with _serving() as (server,):
        server.sglang.is_paused = True
        client = _client(server)
        await client.attach()
        await client.check()
        await client.close()


async def test_tokens_under_another_label_are_discarded() -> None:
    """Another owner took the server while this one stood still."""
    async with _serving() as (server,), _engine([server], []) as engine:
        await _adopt(engine, 1, 0.5)
        server.sglang.label = str(Label(owner="other", session="x", version="1"))
        server.sglang.bias = 9.0
        task = asyncio.ensure_future(engine.generate(request("r", (1, 2), max_tokens=3)))
        await until(lambda: not engine.backend.fleet.serving, poll_s=0.005)
        server.sglang.label = "none"
        result = await task
        assert result.logprobs == (-0.5,) * 3


async def test_a_token_that_ends_texts_by_the_servers_configuration_ends_no_response() -> None:
    async with _serving() as (server,), _engine([server], []) as engine:
        await _adopt(engine, 1, 0.5)
        server.sglang.script = [7, 15, 7, 15]
        result = await engine.generate(
            request("r", (1, 2), max_tokens=9, stop_token_ids=frozenset({3}))
        )
        assert (result.token_ids, result.finish_reason) == ((7, 15, 7, 15) + (7,) * 5, "length")
        server.sglang.script = [7, 15]
        result = await engine.generate(
            request("s", (1, 2), max_tokens=9, stop_token_ids=frozenset({15}))
        )
        assert (result.token_ids, result.finish_reason) == ((7, 15), "stop")


@pytest.mark.parametrize("status", [429, 503])
async def test_a_response_that_ends_in_an_overload_slows_requests_down_and_ends_none(
    status: int,
) -> None:
    events: list[str] = []
    async with _serving() as (server,), _engine([server], events) as engine:
        await _adopt(engine, 1, 0.5)
        full = {"type": "abort", "status_code": status, "message": "the queue is full"}
        server.sglang.ends += [full] * 5
        result = await engine.generate(request("r", (1, 2), max_tokens=3))
        assert (result.version_runs, server.sglang.ends) == (((1, 3),), [])
    (event,) = events
    assert event.startswith(f"EngineServerOverloaded: {server.address} gets work later")
    assert "the queue is full" in event


async def test_a_load_that_failed_is_ended_before_the_next_one() -> None:
    async with _serving() as (server,):
        client = _client(server)
        await client.attach()
        server.sglang.failing.add("/update_weights_from_tensor")
        weights = fleet_weights(1, 0.5)
        with pytest.raises(ServerRefusedError, match="answered 400"):
            await client.load(weights)
        assert server.sglang.is_paused and server.sglang.is_updating
        assert Label.parse(server.sglang.label).version == "loading"
        with pytest.raises(ServerAwayError, match="instead of version"):
            await client.score((1, 2))
        server.sglang.failing.clear()
        await client.load(weights)
        assert client.serves(weights)
        assert not server.sglang.is_paused
        await client.close()


async def test_a_server_whose_checksum_differs_from_anothers_gets_no_work() -> None:
    async with _serving(2) as servers:
        clients = [_client(server) for server in servers]
        weights = fleet_weights(1, 0.5)
        for client in clients:
            await client.attach()
        await clients[0].load(weights)
        servers[1].sglang.checksum = lambda: "other"
        with pytest.raises(ServerRefusedError, match="holds other weights than"):
            await clients[1].load(weights)
        assert not clients[1].serves(weights)
        servers[1].sglang.answers["device"] = "cpu"
        await clients[1].attach()
        await clients[1].load(weights)
        assert clients[1].serves(weights)
        for client in clients:
            await client.close()


async def test_an_owner_that_lives_keeps_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(module, "_now", lambda: now_s)
    monkeypatch.setattr(module, "_BEAT_S", 0.0)
    monkeypatch.setattr(module, "_SILENCE_S", 0.1)
    async with _serving() as (server,):
        owner, other = _client(server, "one"), _client(server, "two")
        await owner.attach()
        for _ in range(4):
            with pytest.raises(ServerBusyError, match="'one' uses this server"):
                await other.attach()
            now_s += 0.06
            await owner.check()  # which renews its name
        with pytest.raises(ServerBusyError):
            await other.attach()
        now_s += 0.12
        await other.attach()
        with pytest.raises(ServerAwayError, match="another owner attached"):
            await owner.check()
        await other.close()
        await _client(server, "three").attach()  # at once: the last owner ended


async def test_an_owner_keeps_its_server_in_an_operation_that_outlasts_a_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_BEAT_S", 0.1)
    # A busy machine may take longer than these short beats to ask the server.
    monkeypatch.setattr(module.SglangServer, "_check_delay", lambda self, since: None)
    async with _serving() as (server,):
        client, weights = _client(server), fleet_weights(1, 0.5)
        await client.attach()
        engine = server.sglang
        may_end = engine.blocked_paths["/end_weight_update"] = asyncio.Event()
        loading = asyncio.ensure_future(client.load(weights))
        await until(lambda: "/end_weight_update" in engine.calls, poll_s=0.005)
        num_labels = len(engine.labels)
        await until(lambda: len(engine.labels) >= num_labels + 2, poll_s=0.005)
        assert len({*engine.labels}) == len(engine.labels)
        assert all(":loading:" in label for label in engine.labels[num_labels:])
        may_end.set()
        await loading
        assert ":1:" in engine.label
        await client.close()


async def test_an_owner_whose_server_was_taken_in_an_operation_leaves_it_to_the_other() -> None:
    async with _serving() as (server,):
        client, weights = _client(server), fleet_weights(1, 0.5)
        await client.attach()
        engine = server.sglang
        may_end = engine.blocked_paths["/end_weight_update"] = asyncio.Event()
        loading = asyncio.ensure_future(client.load(weights))
        await until(lambda: "/end_weight_update" in engine.calls, poll_s=0.005)
        label = engine.label = str(Label(owner="another", session="s", version="loading"))
        may_end.set()
        with pytest.raises(ServerAwayError, match="another owner attached"):
            await loading
        assert engine.label == label
        assert engine.is_paused
        await client.close()


async def test_a_process_that_stood_still_does_not_renew_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _serving() as (server,):
        client = _client(server)
        await client.attach()
        monkeypatch.setattr(module, "_BEAT_S", -1.0)
        labels = [*server.sglang.labels]
        with pytest.raises(ServerAwayError, match="to answer"):
            await client.check()
        assert server.sglang.labels == labels


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "auto"}, "dtype is 'auto'; start SGLang with --dtype float32"),
        ({"enable_fp32_lm_head": False}, "--enable-fp32-lm-head"),
        ({"dp_size": 2}, "one server for each replica"),
        ({"quantization": "fp8"}, "no --quantization"),
        ({"max_req_input_len": 90}, r"set rollout\.engine_arguments\.context_length to 90"),
    ],
)
async def test_what_a_server_lacks_is_named(changes: dict[str, Any], message: str) -> None:
    async with _serving() as (server,):
        server.sglang.answers |= changes
        with pytest.raises(EngineDiedError, match=message):
            await build(engine_config([], [], arguments=_arguments([server]))).run()


@pytest.mark.parametrize(
    "updates", [20, pytest.param(200, marks=[pytest.mark.nightly, pytest.mark.timeout(600)])]
)
async def test_no_token_has_another_version_than_it_states_while_servers_restart_at_random(
    updates: int,
) -> None:
    draws = random.Random(5)
    results: list[GenerationResult] = []
    async with _serving(3) as servers, _engine(servers, []) as engine:
        await _adopt(engine, 0, _value(0))

        async def sample(number: int) -> None:
            for index in range(updates):
                generation = request(f"r{number}.{index}", (number, 2), max_tokens=6)
                results.append(await engine.generate(generation))

        async def restart() -> None:
            while True:
                await draws.choice(servers).restart()
                await asyncio.sleep(draws.uniform(0.02, 0.2))

        async with asyncio.timeout(20 * updates), asyncio.TaskGroup() as tasks:
            restarting = tasks.create_task(restart())
            sampling = [tasks.create_task(sample(number)) for number in range(4)]
            for version in range(1, updates + 1):
                await _adopt(engine, version, _value(version))
            await asyncio.wait(sampling)
            restarting.cancel()
    assert len(results) == 4 * updates
    for result in results:
        assert len(result.token_ids) == 6
        versions = [version for version, count in result.version_runs for _ in range(count)]
        assert list(result.logprobs) == [-_value(version) for version in versions]
