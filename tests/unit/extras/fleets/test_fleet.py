"""A fleet gives work only to servers that serve its version, and no token has another one than it states."""

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from starlette.responses import Response

from services.extras.fleets import fleet as fleet_module
from services.extras.fleets import stream as stream_module
from services.extras.fleets import vllm_server as vllm_server_module
from services.extras.fleets.client import ServerAwayError, ServerDeferringError
from services.extras.fleets.engine import FleetEngine
from services.extras.fleets.vllm_server import build
from services.rollout.engines.base import EngineDiedError, GenerationResult
from tests.helpers.engines import request, running, until
from tests.unit.extras.fleets.servers import (
    FakeServer,
    attached,
    attached_engine,
    engine_config,
    serving,
)

MANY = 1000


@pytest.fixture(autouse=True)
def fast_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_PROBE_EVERY_S", 0.05)
    monkeypatch.setattr(stream_module, "_RETRY_S", 0.01)
    monkeypatch.setattr(fleet_module, "_OVERLOAD_DELAYS_S", (0.01, 0.02))


async def _adopt(engine: FleetEngine, version: int, value: float) -> None:
    tensors = {spec.name: torch.full(spec.shape, value) for spec in engine.weight_specs()}
    await engine.adopt_weights(version, tensors)


def _allow(servers: list[FakeServer], number: int) -> None:
    for server in servers:
        for _ in range(number):
            server.engine.steps.release()


async def _begin_response(
    engine: FleetEngine, servers: list[FakeServer]
) -> tuple[asyncio.Future[GenerationResult], FakeServer, FakeServer]:
    """Returns a response of six tokens that has two, the server that samples it, and the other server."""
    await _adopt(engine, 1, 0.5)
    task = asyncio.ensure_future(engine.generate(request("r", (1, 2), max_tokens=6)))
    _allow(servers, 2)
    await until(lambda: engine.stats().tokens_total == 2)
    (used,) = [server for server in servers if server.engine.num_sampled]
    (other,) = [server for server in servers if server is not used]
    return task, used, other


async def test_tokens_state_the_version_of_the_weights_that_sampled_them() -> None:
    async with serving(2) as servers, attached_engine(servers, []) as engine:
        await _adopt(engine, 1, 0.5)
        task = asyncio.ensure_future(engine.generate(request("r", (1, 2), max_tokens=9)))
        _allow(servers, 4)
        await until(lambda: engine.stats().tokens_total == 4)
        await _adopt(engine, 2, 0.25)
        _allow(servers, MANY)
        result = await task
        assert result.version_runs == ((1, 4), (2, 5))
        assert result.logprobs == (-0.5,) * 4 + (-0.25,) * 5
        salts = {body["cache_salt"] for server in servers for body in server.engine.requests}
        assert len(salts) == 2


async def test_a_server_that_restarts_between_requests_gets_no_work_before_it_has_the_weights() -> (
    None
):
    events: list[str] = []
    async with serving() as (server,), attached_engine([server], events) as engine:
        await _adopt(engine, 1, 0.5)
        await server.restart()
        _allow([server], MANY)
        result = await engine.generate(request("r", (1, 2), max_tokens=3))
        assert result.version_runs == ((1, 3),)
        assert result.logprobs == (-0.5,) * 3
        assert server.engine.num_sampled == 3
    lost, *_, serves = events
    assert lost.startswith(f"EngineServerLost: {server.address} gets no work")
    assert serves == f"EngineServerServes: {server.address} serves version 1"


async def test_a_response_continues_elsewhere_when_its_server_is_lost() -> None:
    events: list[str] = []
    async with serving(2) as servers, attached_engine(servers, events) as engine:
        task, used, other = await _begin_response(engine, servers)
        await used.stop()
        _allow([other], MANY)
        result = await task
        assert result.token_ids == (7,) * 6
        assert result.version_runs == ((1, 6),)
        assert other.engine.num_sampled == 4
        await used.start()
        await until(lambda: len(engine.backend.fleet.serving) == 2, poll_s=0.005)
        assert used.engine.bias == 0.5


async def test_a_server_that_was_asked_to_end_gets_no_further_work() -> None:
    events: list[str] = []
    async with serving(2) as servers, attached_engine(servers, events) as engine:
        task, used, other = await _begin_response(engine, servers)
        used.engine.shutdown(timeout=60)
        _allow([other], MANY)
        result = await task
        assert (result.token_ids, result.version_runs) == ((7,) * 6, ((1, 6),))
        assert (used.engine.num_sampled, other.engine.num_sampled) == (2, 4)
        await _adopt(engine, 2, 0.25)
        assert [server.address for server in engine.backend.fleet.attached] == [other.address]
        await used.restart()
        await until(lambda: len(engine.backend.fleet.serving) == 2, poll_s=0.005)
        assert used.engine.bias == 0.25
    lost, serves = events
    assert lost.startswith(f"EngineServerLost: {used.address} gets no work")
    assert "was asked to end" in lost
    assert serves == f"EngineServerServes: {used.address} serves version 2"


async def test_requests_wait_while_no_server_is_there_and_adoptions_do_not() -> None:
    async with serving() as (server,), attached_engine([server], []) as engine:
        await _adopt(engine, 1, 0.5)
        await server.stop()
        await until(lambda: not engine.backend.fleet.attached, poll_s=0.005)
        task = asyncio.ensure_future(engine.generate(request("r", (1, 2), max_tokens=2)))
        await _adopt(engine, 2, 0.25)
        assert engine.stats().weight_version == 2
        assert not task.done()
        await server.start()
        _allow([server], MANY)
        result = await task
        assert result.version_runs == ((2, 2),)
        assert result.logprobs == (-0.25, -0.25)


async def test_a_server_whose_logprobs_differ_gets_no_work_and_is_named() -> None:
    events: list[str] = []
    async with serving(3) as servers, attached_engine(servers, events) as engine:
        await _adopt(engine, 1, 0.5)
        wrong = servers[1]
        wrong.engine.bias = 0.75
        assert await engine.score((1, 2, 3)) == (-0.5, -0.5)
        await until(lambda: len(events) == 2, poll_s=0.005)
        assert events[0].startswith(
            f"EngineServerLost: {wrong.address} gets no work: {wrong.address} serves other weights"
        )
        assert events[1] == f"EngineServerServes: {wrong.address} serves version 1"
        assert wrong.engine.bias == 0.5


async def test_a_server_that_comes_later_is_compared_by_the_canary_too() -> None:
    events: list[str] = []
    async with serving(2) as servers, attached_engine(servers, events) as engine:
        first, second = servers
        await _adopt(engine, 1, 0.5)
        await engine.score((1, 2, 3))
        await second.stop()
        await until(lambda: len(engine.backend.fleet.serving) == 1, poll_s=0.005)
        await second.start()

        async def misplace(method: str, args: tuple[str, ...]) -> list[dict[str, Any]]:
            second.engine.bias = 0.75
            return [{"way": "reloaded", "differing": []}]

        second.engine.collective_rpc = misplace  # type: ignore[method-assign]
        await until(lambda: second.engine.bias == 0.75, poll_s=0.005)
        _allow(servers, MANY)
        results = await asyncio.gather(
            *[engine.generate(request(f"r{n}", (n, 2), max_tokens=4)) for n in range(6)]
        )
        assert {result.logprobs for result in results} == {(-0.5,) * 4}
        assert second.engine.num_sampled == 0
        assert [server.address for server in engine.backend.fleet.serving] == [first.address]


async def test_a_server_that_freezes_while_it_scores_does_not_delay_the_others() -> None:
    async with serving(2) as servers, attached_engine(servers, []) as engine:
        await _adopt(engine, 1, 0.5)
        fleet = engine.backend.fleet
        frozen = servers[0]
        frozen.engine.scores.clear()
        scoring = asyncio.ensure_future(engine.score((1, 2, 3)))
        await until(lambda: len(frozen.engine.requests) == 1)
        (lost,) = [server for server in fleet.serving if server.address == frozen.address]
        fleet.lose(lost, "its check failed")
        assert await scoring == (-0.5, -0.5)


class _Events(list[str]):
    """Events, the first of which restores deadlines that healthy servers miss on a busy machine."""

    def __init__(self, deadlines: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._deadlines = deadlines

    def append(self, event: str) -> None:
        self._deadlines.undo()
        super().append(event)


async def test_a_response_leaves_a_server_whose_engine_hangs_while_it_answers() -> None:
    with pytest.MonkeyPatch.context() as deadlines:
        events = _Events(deadlines)
        async with serving(2) as servers, attached_engine(servers, events) as engine:
            task, frozen, other = await _begin_response(engine, servers)
            frozen.engine.scores.clear()
            _allow([other], MANY)
            deadlines.setattr(fleet_module, "_SILENCE_S", 0.0)
            deadlines.setattr(vllm_server_module, "SCORE_TIMEOUT_S", 0.1)
            result = await task
            assert result.token_ids == (7,) * 6
            assert other.engine.num_sampled == 4
    assert events[0].startswith(
        f"EngineServerLost: {frozen.address} gets no work: it sent no token"
    )


async def test_a_silent_server_that_refuses_further_work_keeps_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "_SILENCE_S", 0.1)
    events: list[str] = []
    num_probes = 0

    async def defer(token_ids: Sequence[int]) -> tuple[float, ...]:
        nonlocal num_probes
        num_probes += 1
        raise ServerDeferringError("it answered 503")

    async with serving(1) as (server,), attached_engine([server], events) as engine:
        await _adopt(engine, 1, 0.5)
        (fleet_server,) = engine.backend.fleet.serving
        monkeypatch.setattr(fleet_server, "score", defer)
        task = asyncio.ensure_future(engine.generate(request("r", (1, 2), max_tokens=3)))
        await until(lambda: num_probes == 3, poll_s=0.005)
        assert fleet_server.num_running == 1
        _allow([server], MANY)
        assert (await task).token_ids == (7,) * 3
        assert server.engine.num_sampled == 3
    assert events == []


async def test_a_server_that_refuses_work_until_a_try_has_no_time_left_defers() -> None:
    async with serving(1) as (server,), attached(server) as client:
        answers = iter([(503, b"full", 0.0)])

        async def send(*args: Any, **options: Any) -> tuple[int, bytes, float]:
            for answer in answers:
                return answer
            raise ServerAwayError("no answer in time") from TimeoutError()

        client.send = send  # type: ignore[method-assign]
        with pytest.raises(ServerDeferringError, match="503"):
            await client.ask("GET", "/path")
        with pytest.raises(ServerAwayError, match="no answer in time"):
            await client.ask("GET", "/path")
        del client.send


async def test_a_server_that_refuses_work_and_sends_no_token_for_too_long_is_lost() -> None:
    with pytest.MonkeyPatch.context() as deadlines:
        events = _Events(deadlines)
        async with serving(2) as servers, attached_engine(servers, events) as engine:
            task, silent, other = await _begin_response(engine, servers)
            silent.engine.refusals = [Response(status_code=503) for _ in range(MANY)]
            _allow([other], MANY)
            deadlines.setattr(fleet_module, "_SILENCE_S", 0.0)
            deadlines.setattr(fleet_module, "_OVERLOAD_DEADLINE_S", 0.3)
            deadlines.setattr(vllm_server_module, "SCORE_TIMEOUT_S", 0.1)
            assert (await task).token_ids == (7,) * 6
            assert other.engine.num_sampled == 4
    assert events[0].startswith(
        f"EngineServerLost: {silent.address} gets no work: it sent no token"
    )


async def test_a_server_that_is_slow_keeps_its_requests_if_its_engine_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "_SILENCE_S", 0.1)
    events: list[str] = []
    async with serving(1) as (server,), attached_engine([server], events) as engine:
        await _adopt(engine, 1, 0.5)
        task = asyncio.ensure_future(engine.generate(request("r", (1, 2), max_tokens=3)))
        await until(lambda: _num_scored(server) == 3, poll_s=0.005)
        _allow([server], MANY)
        assert (await task).token_ids == (7,) * 3
        assert sum(body["stream"] for body in server.engine.requests) == 1
    assert not events


def _num_scored(server: FakeServer) -> int:
    return sum(not body["stream"] for body in server.engine.requests)


async def test_a_failure_of_an_old_session_does_not_end_the_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as (server,), attached_engine([server], []) as engine:
        await _adopt(engine, 1, 0.5)
        fleet = engine.backend.fleet
        (client,) = fleet.serving
        went_on = asyncio.Event()

        async def fail(*_: object) -> tuple[float, ...]:
            try:
                await asyncio.Event().wait()
            finally:
                went_on.set()
            return ()

        monkeypatch.setattr(client, "score", fail)
        trying = asyncio.ensure_future(fleet._try_score(client, (1, 2)))
        await asyncio.sleep(0)
        fleet.lose(client, "its check failed")
        assert await trying is None
        await went_on.wait()
        await until(lambda: bool(fleet.serving), poll_s=0.005)


async def test_a_score_does_not_delay_an_adoption_while_no_server_is_there() -> None:
    async with serving() as (server,), attached_engine([server], []) as engine:
        await _adopt(engine, 1, 0.5)
        server.engine.scores.clear()
        scoring = asyncio.ensure_future(engine.score((1, 2, 3)))
        await until(lambda: len(server.engine.requests) == 1)
        await server.stop()
        await until(lambda: not engine.backend.fleet.attached, poll_s=0.005)
        await asyncio.wait_for(_adopt(engine, 2, 0.25), 5)
        assert not scoring.done()
        await server.start()
        assert await scoring == (-0.25, -0.25)


async def test_a_server_that_always_differs_is_tried_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []

    def hour(first_s: float, max_s: float) -> Iterator[float]:
        while True:
            waits.append(3600.0)
            yield 3600.0

    events: list[str] = []
    monkeypatch.setattr(fleet_module, "delays", hour)
    async with serving(3) as servers, attached_engine(servers, events) as engine:
        await _adopt(engine, 1, 0.5)
        wrong = servers[1].engine
        num_loads = 0

        async def misplace(method: str, args: tuple[str, ...]) -> list[dict[str, Any]]:
            nonlocal num_loads
            num_loads += 1
            wrong.bias = 0.75
            return [{"way": "reloaded", "differing": []}]

        wrong.collective_rpc = misplace  # type: ignore[method-assign]
        wrong.bias = 0.75
        await engine.score((1, 2, 3))
        await until(lambda: bool(waits), poll_s=0.005)
        assert num_loads == 1
        assert len(engine.backend.fleet.serving) == 2


async def test_notifications_do_not_extend_the_wait_for_a_slow_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "_GRACE_S", 0.2)
    async with serving(2) as servers, attached_engine(servers, []) as engine:
        await _adopt(engine, 1, 0.5)
        slow, fleet = servers[0].engine, engine.backend.fleet
        go_on = asyncio.Event()

        async def wait(method: str, args: tuple[str, ...]) -> list[dict[str, Any]]:
            await go_on.wait()
            slow.bias = 0.25
            return [{"way": "compared", "differing": []}]

        slow.collective_rpc = wait  # type: ignore[method-assign]

        async def notify() -> None:
            while True:
                fleet._notify()
                await asyncio.sleep(0.02)

        notifying = asyncio.ensure_future(notify())
        try:
            await asyncio.wait_for(_adopt(engine, 2, 0.25), 5)
            assert len(fleet.serving) == 1
        finally:
            notifying.cancel()
            go_on.set()


async def test_a_request_in_which_every_server_fails_takes_no_server_down() -> None:
    events: list[str] = []
    async with serving(2) as servers, attached_engine(servers, events) as engine:
        await _adopt(engine, 1, 0.5)
        sessions = {server.session for server in engine.backend.fleet.serving}
        for server in servers:
            server.engine.poison.add(9)
        with pytest.raises(EngineDiedError, match=r"failed 3 times .* the kernel failed"):
            await engine.generate(request("r", (9, 2), max_tokens=3))
        assert sorted(len(server.engine.requests) for server in servers) == [1, 2]
        assert {server.session for server in engine.backend.fleet.serving} == sessions
    assert not events


@pytest.mark.parametrize(
    ("status", "headers"), [(429, {}), (503, {"Retry-After": "0"}), (502, {}), (504, {})]
)
async def test_an_overloaded_server_slows_requests_down_and_ends_none(
    status: int, headers: dict[str, str]
) -> None:
    events: list[str] = []
    async with serving() as (server,), attached_engine([server], events) as engine:
        await _adopt(engine, 1, 0.5)
        (client,) = engine.backend.fleet.serving
        session = client.session
        server.engine.refusals += [Response("later", status, headers) for _ in range(8)]
        _allow([server], MANY)
        result = await engine.generate(request("r", (1, 2), max_tokens=3))
        assert result.version_runs == ((1, 3),)
        assert (len(server.engine.requests), client.session) == (9, session)
        assert client.refusals is None
    (event,) = events
    assert event.startswith(f"EngineServerOverloaded: {server.address} gets work later")
    assert f"answered {status}" in event


async def test_a_server_that_names_a_time_gets_no_request_before_it() -> None:
    async with serving() as (server,), attached_engine([server], []) as engine:
        await _adopt(engine, 1, 0.5)
        server.engine.refusals.append(Response("later", 503, {"Retry-After": "1"}))
        _allow([server], MANY)
        started_at = asyncio.get_running_loop().time()
        await engine.generate(request("r", (1, 2), max_tokens=3))
        assert asyncio.get_running_loop().time() - started_at >= 1.0


async def test_servers_that_stay_overloaded_end_the_engine_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "_OVERLOAD_DEADLINE_S", 0.1)
    async with serving() as (server,), attached_engine([server], []) as engine:
        await _adopt(engine, 1, 0.5)
        server.engine.refusals += [Response("first", 429)]
        server.engine.refusals += [Response("later", 503) for _ in range(MANY)]
        with pytest.raises(EngineDiedError, match=r"no server .* answered 429 .*: first"):
            await engine.generate(request("r", (1, 2), max_tokens=3))


async def test_refusals_long_ago_do_not_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_OVERLOAD_DEADLINE_S", 0.2)
    monkeypatch.setattr(fleet_module, "_MAX_REFUSAL_GAP_S", 0.05)
    async with serving() as (server,), attached_engine([server], []) as engine:
        await _adopt(engine, 1, 0.5)
        server.engine.refusals.append(Response("first", 429))
        asking = asyncio.ensure_future(engine.generate(request("r", (1, 2), max_tokens=3)))
        await until(lambda: len(server.engine.requests) == 2)
        await engine.abort({"r"})
        await asking
        await asyncio.sleep(0.3)  # nobody asks meanwhile
        server.engine.refusals.append(Response("second", 429))
        _allow([server], MANY)
        result = await engine.generate(request("s", (1, 2), max_tokens=3))
        assert result.version_runs == ((1, 3),)


@pytest.mark.parametrize("code", [429, 503])
async def test_a_response_that_ends_in_an_overload_slows_requests_down_and_ends_none(
    code: int,
) -> None:
    events: list[str] = []
    async with serving() as (server,), attached_engine([server], events) as engine:
        await _adopt(engine, 1, 0.5)
        end = json.dumps({"error": {"message": "the queue is full", "code": code}})
        body = f"data: {end}\n\ndata: [DONE]\n\n"
        stream = {"Content-Type": "text/event-stream"}
        server.engine.refusals += [Response(body, headers=stream) for _ in range(5)]
        _allow([server], MANY)
        result = await engine.generate(request("r", (1, 2), max_tokens=3))
        assert (result.version_runs, len(server.engine.requests)) == (((1, 3),), 6)
    (event,) = events
    assert event.startswith(f"EngineServerOverloaded: {server.address} gets work later")
    assert "the queue is full" in event


@pytest.mark.parametrize("code", [500, "429", None, [429]])
async def test_a_response_that_ends_in_another_error_counts_as_a_failure(code: object) -> None:
    async with serving() as (server,), attached_engine([server], []) as engine:
        await _adopt(engine, 1, 0.5)
        server.engine.malformed.append(json.dumps({"error": {"message": "broken", "code": code}}))
        with pytest.raises(EngineDiedError, match=r"failed 3 times .* ended a response: .*broken"):
            await engine.generate(request("r", (1, 2), max_tokens=3))


async def test_a_connection_that_is_reset_costs_neither_tokens_nor_the_session() -> None:
    events: list[str] = []
    async with serving() as (server,), attached_engine([server], events) as engine:
        await _adopt(engine, 1, 0.5)
        (client,) = engine.backend.fleet.serving
        session = client.session
        task = asyncio.ensure_future(engine.generate(request("r", (1, 2), max_tokens=9)))
        _allow([server], 4)
        await until(lambda: engine.stats().tokens_total == 4)
        server.reset_connections()
        _allow([server], MANY)
        result = await task
        assert result.version_runs == ((1, 9),)
        assert client.session == session
    assert not events


async def test_a_request_goes_to_another_server_than_the_one_that_failed_in_it() -> None:
    async with serving(2) as servers, attached_engine(servers, []) as engine:
        await _adopt(engine, 1, 0.5)
        servers[0].engine.poison.add(9)
        _allow(servers, MANY)
        for index in range(4):
            result = await engine.generate(request(f"r{index}", (9, index), max_tokens=3))
            assert result.token_ids == (7,) * 3
        assert servers[0].engine.requests
        assert len(engine.backend.fleet.serving) == 2


@pytest.mark.parametrize("line", ["[]", '{"choices": [3]}', '{"choices": [{"token_ids": ["a"]}]}'])
async def test_a_malformed_event_names_the_server(line: str) -> None:
    async with serving() as (server,), attached_engine([server], []) as engine:
        await _adopt(engine, 1, 0.5)
        server.engine.malformed.append(line)
        with pytest.raises(EngineDiedError, match=rf"{server.address} sent a malformed event"):
            await engine.generate(request("r", (1, 2), max_tokens=3))


async def test_tokens_of_a_vllm_that_names_them_by_text_have_logprobs() -> None:
    async with serving() as (server,), attached_engine([server], []) as engine:
        await _adopt(engine, 1, 0.5)
        server.engine.entry = {"token": "token_id:7", "top_logprobs": []}
        _allow([server], MANY)
        result = await engine.generate(request("r", (1, 2), max_tokens=3))
        assert (result.token_ids, result.logprobs) == ((7,) * 3, (-0.5,) * 3)
        server.engine.bias = 9999.0  # what vLLM 0.26 writes for a token without a logprob
        with pytest.raises(EngineDiedError, match="sent 1 tokens with 0 logprobs"):
            await engine.generate(request("s", (1, 2), max_tokens=3))


async def test_siblings_share_a_server_and_others_go_to_the_idlest() -> None:
    async with serving(2) as servers, attached_engine(servers, []) as engine:
        await _adopt(engine, 1, 0.5)
        contexts = [(1, 2)] * 4 + [(3, 4)] * 4
        tasks = [
            asyncio.ensure_future(engine.generate(request(f"r{n}", context, max_tokens=2)))
            for n, context in enumerate(contexts)
        ]
        await until(lambda: sum(len(server.engine.requests) for server in servers) == 8)
        contexts_by_server = [
            {tuple(body["token_ids"]) for body in server.engine.requests} for server in servers
        ]
        assert sorted(map(len, contexts_by_server)) == [1, 1]
        _allow(servers, MANY)
        await asyncio.gather(*tasks)


async def test_an_engine_without_a_fitting_server_ends_with_what_each_lacks() -> None:
    events: list[str] = []
    async with serving(3) as servers:
        models = [server.engine.vllm_config.model_config for server in servers]
        models[0].logprobs_mode = "raw_logprobs"
        models[1].hf_text_config.vocab_size = 32
        models[2].dtype = torch.bfloat16
        with pytest.raises(EngineDiedError) as raised:
            await build(engine_config(servers, events)).run()
        assert "start vLLM with --logprobs-mode processed_logprobs" in str(raised.value)
        assert "vocab_size is 32, but 16 in the run; start vLLM with its model" in str(raised.value)
        assert "dtype is 'bfloat16'; start vLLM with --dtype float32" in str(raised.value)
        assert sorted(event.partition(":")[0] for event in events) == ["EngineServerRefused"] * 3


async def test_an_address_outside_the_policy_is_refused() -> None:
    config = engine_config([], [], arguments={"addresses": ["http://10.0.0.1:8000"]}, reach=None)
    with pytest.raises(EngineDiedError, match="reward_hosts"):
        await build(config).run()


async def test_an_aborted_request_keeps_its_tokens() -> None:
    async with serving() as (server,), attached_engine([server], []) as engine:
        await _adopt(engine, 1, 0.5)
        task = asyncio.ensure_future(engine.generate(request("r", (1, 2), max_tokens=9)))
        _allow([server], 3)
        await until(lambda: engine.stats().tokens_total == 3)
        await engine.abort()
        result = await task
        assert (result.token_ids, result.finish_reason) == ((7,) * 3, "aborted")
        assert result.version_runs == ((1, 3),)


@pytest.mark.parametrize(
    "updates", [30, pytest.param(200, marks=[pytest.mark.nightly, pytest.mark.timeout(600)])]
)
async def test_no_token_has_another_version_than_it_states_while_servers_restart_at_random(
    updates: int,
) -> None:
    draws = random.Random(5)
    results: list[GenerationResult] = []
    async with serving(3) as servers:
        engine = build(engine_config(servers, []))
        async with running(engine), asyncio.timeout(20 * updates):
            await engine.wait_ready()
            await _adopt(engine, 0, _value(0))

            async def sample(number: int) -> None:
                for index in range(updates):
                    generation = request(f"r{number}.{index}", (number, 2), max_tokens=6)
                    results.append(await engine.generate(generation))

            async def restart() -> None:
                while True:
                    server = draws.choice(servers)
                    await server.restart()
                    await asyncio.sleep(draws.uniform(0.02, 0.2))

            async def allow() -> None:
                while True:
                    _allow(servers, 1)
                    await asyncio.sleep(0.001)

            async with asyncio.TaskGroup() as tasks:
                ticking = [tasks.create_task(restart()), tasks.create_task(allow())]
                sampling = [tasks.create_task(sample(number)) for number in range(4)]
                for version in range(1, updates + 1):
                    await _adopt(engine, version, _value(version))
                await asyncio.wait(sampling)
                for task in ticking:
                    task.cancel()
    assert len(results) == 4 * updates
    for result in results:
        assert len(result.token_ids) == 6
        versions = [version for version, count in result.version_runs for _ in range(count)]
        assert list(result.logprobs) == [-_value(version) for version in versions]


def _value(version: int) -> float:
    """Returns the weights of a version, which a float32 holds exactly."""
    return (version + 1) / 256
