"""Responses of token lines go on under the next version, and every token states the one that sampled it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from services.extras.fleets import answers as answers_module
from services.extras.fleets import fleet as fleet_module
from services.extras.fleets import groups as groups_module
from services.extras.fleets import server as server_module
from services.extras.fleets import stream as stream_module
from services.extras.fleets.answers import RefusedError
from services.extras.fleets.engine import FleetEngine
from services.extras.fleets.groups import read_token_line
from services.extras.fleets.protocol import CUT, GENERATE, LOAD, SCHEDULER
from services.extras.fleets.vllm_server import build
from services.extras.fleets.vllm_tokens import VllmTokens
from services.extras.vllm.kind import MAX_IMAGE_TOKENS
from services.rollout.engines.base import GenerationResult
from services.rollout.engines.engine_config import ImageLimits
from services.wire.data.model_inputs import ModelInputs
from tests.helpers.engines import request, running, until
from tests.unit.extras.fleets.servers import (
    TOKEN,
    FakeEngine,
    FakeServer,
    application,
    attached,
    attached_engine,
    engine_config,
)

MANY = 1000
_GATHERS_ALL_S = 2.0  # long enough for requests of a busy machine
Result = TypeVar("Result")


class TokenEngine(FakeEngine):
    """Engine with the parts of vLLM's ``AsyncLLM`` that token lines use; it batches two tokens."""

    make_parameters = SimpleNamespace

    def __init__(self) -> None:
        super().__init__()
        self.vllm_config.scheduler_config.scheduler_cls = SCHEDULER
        self.engine_core = self.input_processor = self.output_processor = self
        self.era = 0
        self.names: list[str] = []
        self.aborted: list[str] = []
        self.empties_cache = True
        self.decoding: list[asyncio.Future[None]] = []
        self.can_load = asyncio.Event()
        self.can_load.set()
        self._running = asyncio.Event()
        self._running.set()
        self._calls = asyncio.Lock()

    async def _call(self, call: Awaitable[Result]) -> Result:
        """Executes calls one after the other; a caller that gives up ends no call, as in vLLM."""

        async def execute() -> Result:
            async with self._calls:
                return await call

        return await asyncio.shield(asyncio.ensure_future(execute()))

    async def collective_rpc(self, method: str, args: tuple[str, ...]) -> list[dict[str, Any]]:
        return await self._call(self._load(method, args))

    async def _load(self, method: str, args: tuple[str, ...]) -> list[dict[str, Any]]:
        await self.can_load.wait()
        return await super().collective_rpc(method, args)

    def process_inputs(self, name: str, prompt: Any, parameters: Any, tasks: Any) -> Any:
        if not prompt["prompt_token_ids"]:
            raise ValueError("the prompt is empty")
        self.requests.append(prompt)
        return SimpleNamespace(request_id=name, max_tokens=parameters.max_tokens)

    def process_outputs(self, outputs: Any) -> Any:
        return outputs

    def propagate_error(self, error: Exception) -> None:
        raise error

    async def add_request_async(self, request: Any) -> None:
        self.names.append(request.request_id)
        self.decoding.append(
            asyncio.ensure_future(self._decode(request.request_id, request.max_tokens))
        )

    async def abort_requests_async(self, names: list[str]) -> None:
        self.aborted += names

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        await self._call(self._pause())

    async def _pause(self) -> None:
        self._running.clear()

    async def reset_prefix_cache_async(self, **options: bool) -> bool:
        assert options == {"reset_running_requests": True, "reset_connector": True}
        return await self._call(self._reset())

    async def _reset(self) -> bool:
        return self.empties_cache

    async def resume_scheduler_async(self) -> None:
        await self._call(self._resume())

    async def _resume(self) -> None:
        if not self._running.is_set():
            self.era += 1
        self._running.set()

    async def _decode(self, name: str, max_tokens: int) -> None:
        logprobs: list[float] = []
        eras: list[tuple[int, int]] = []
        for index in range(max_tokens):
            await self.steps.acquire()
            await self._running.wait()
            if name in self.aborted:
                self.steps.release()
                return
            self.num_sampled += 1
            if not eras or eras[-1][0] != self.era:
                eras.append((self.era, len(logprobs)))
            logprobs.append(self.logprob())
            is_last = index == max_tokens - 1
            if is_last or len(logprobs) == 2:
                output = SimpleNamespace(
                    request_id=name,
                    new_token_ids=[7] * len(logprobs),
                    new_logprobs=SimpleNamespace(
                        logprob_token_ids=np.array(eras, np.int32), logprobs=np.array(logprobs)
                    ),
                    prefill_stats=None,
                    finish_reason="length" if is_last else None,
                )
                self.process_outputs([output])
                logprobs, eras = [], []


class TokenServer(FakeServer):
    """Server whose engine sends token lines."""

    engine: TokenEngine

    def __init__(self) -> None:
        super().__init__()
        self.num_loads = self.num_groups = 0
        """Loads and groups of segments that were asked for."""
        self.can_answer = asyncio.Event()
        """Set while the server answers groups."""
        self.can_answer.set()

    def application(self) -> Starlette:
        self.engine = TokenEngine()
        return application(self.engine)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_loads += scope["path"] == LOAD
        if scope["path"] == GENERATE:
            self.num_groups += 1
            await self.can_answer.wait()
        await super()._answer(scope, receive, send)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_PROBE_EVERY_S", 0.05)
    monkeypatch.setattr(stream_module, "_RETRY_S", 0.01)


@asynccontextmanager
async def _serving(
    number: int = 1, events: list[str] | None = None
) -> AsyncIterator[tuple[list[TokenServer], FleetEngine]]:
    servers = [TokenServer() for _ in range(number)]
    try:
        for server in servers:
            await server.start()
        async with attached_engine([*servers], [] if events is None else events) as engine:
            yield servers, engine
    finally:
        for server in servers:
            await server.close()


async def _adopt(engine: FleetEngine, version: int, value: float) -> None:
    tensors = {spec.name: torch.full(spec.shape, value) for spec in engine.weight_specs()}
    await engine.adopt_weights(version, tensors)


def _allow(server: TokenServer, number: int) -> None:
    for _ in range(number):
        server.engine.steps.release()


def server_tokens(server: TokenServer) -> VllmTokens:
    """Returns the responses of the middleware of a server."""
    tokens = VllmTokens.of_engine(server.engine)
    assert tokens is not None
    return tokens


def _begin(engine: FleetEngine, max_tokens: int) -> asyncio.Future[GenerationResult]:
    return asyncio.ensure_future(engine.generate(request("r", (1, 2), max_tokens=max_tokens)))


async def test_a_response_goes_on_under_the_next_version() -> None:
    async with _serving() as ((server,), engine):
        await _adopt(engine, 1, 0.5)
        task = _begin(engine, 9)
        _allow(server, 3)
        await until(lambda: server.engine.num_sampled == 3)
        await _adopt(engine, 2, 0.25)
        assert engine.stats().recomputed_tokens_total == 2
        _allow(server, MANY)
        result = await task
        assert result.version_runs == ((1, 3), (2, 6))
        assert result.logprobs == (-0.5,) * 3 + (-0.25,) * 6
        assert len(server.engine.names) == 1
        assert not server.engine.aborted


async def test_many_updates_cost_no_token() -> None:
    async with _serving() as ((server,), engine):
        await _adopt(engine, 0, 0.0)
        task = _begin(engine, 41)
        for version in range(1, 21):
            _allow(server, 2)
            await until(lambda number=2 * version: server.engine.num_sampled == number)
            await _adopt(engine, version, version / 4)
        _allow(server, MANY)
        result = await task
        assert result.version_runs == (*((version, 2) for version in range(20)), (20, 1))
        assert result.logprobs == tuple(-(index // 2) / 4 for index in range(41))
        assert server.engine.num_sampled == 41


async def test_responses_of_a_server_that_did_not_load_a_version_are_cut() -> None:
    events: list[str] = []
    async with _serving(2, events) as (servers, engine):
        await _adopt(engine, 1, 0.5)
        task = _begin(engine, 6)
        for server in servers:
            _allow(server, 2)
        await until(lambda: engine.stats().tokens_total == 2)
        (used,) = [server for server in servers if server.engine.num_sampled]
        (other,) = [server for server in servers if server is not used]
        used.engine.differing = ["weight"]
        await _adopt(engine, 2, 0.25)
        _allow(used, MANY)
        _allow(other, MANY)
        result = await task
        assert result.version_runs == ((1, 2), (2, 4))
        assert result.logprobs == (-0.5,) * 2 + (-0.25,) * 4
        assert other.engine.num_sampled == 4
        assert used.engine.aborted == used.engine.names[:1]
    assert events[0].startswith(f"EngineServerRefused: {used.address} gets no work")


async def test_responses_are_cut_if_the_cache_keeps_blocks_of_older_weights() -> None:
    async with _serving() as ((server,), engine):
        await _adopt(engine, 1, 0.5)
        server.engine.empties_cache = False
        task = _begin(engine, 6)
        _allow(server, 2)
        await until(lambda: engine.stats().tokens_total == 2)
        await _adopt(engine, 2, 0.25)
        _allow(server, MANY)
        result = await task
        assert result.version_runs == ((1, 2), (2, 4))
        first, second = server.engine.requests
        assert first["cache_salt"] != second["cache_salt"]
        assert second["prompt_token_ids"] == [1, 2, 7, 7]


async def test_tokens_have_their_version_after_a_load_that_ends_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "WORKERS_TIMEOUT_S", 0.5)
    events: list[str] = []
    async with _serving(1, events) as ((server,), engine):
        await _adopt(engine, 1, 0.5)
        server.engine.can_load.clear()
        adopting = asyncio.ensure_future(_adopt(engine, 2, 0.25))
        await until(lambda: server.num_loads == 2 and "did not load version 2" in str(events))
        # The next load waits in the engine for the one that ends late.
        await until(lambda: server.num_loads == 3)
        await asyncio.sleep(0.05)
        server.engine.can_load.set()
        await adopting
        _allow(server, MANY)
        result = await _begin(engine, 4)
        assert result.version_runs == ((2, 4),)
        assert result.logprobs == (-0.25,) * 4


async def test_an_aborted_response_ends_in_the_engine() -> None:
    async with _serving() as ((server,), engine):
        await _adopt(engine, 1, 0.5)
        task = _begin(engine, 6)
        _allow(server, 2)
        await until(lambda: engine.stats().tokens_total == 2)
        await engine.abort({"r"})
        assert (await task).finish_reason == "aborted"
        await until(lambda: server.engine.aborted == server.engine.names)


def _begin_many(
    engine: FleetEngine, number: int, max_tokens: int
) -> list[asyncio.Future[GenerationResult]]:
    return [
        asyncio.ensure_future(engine.generate(request(f"r{n}", (1, 2), max_tokens=max_tokens)))
        for n in range(number)
    ]


async def test_segments_that_begin_together_share_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(groups_module, "_GATHER_S", _GATHERS_ALL_S)
    async with _serving() as ((server,), engine):
        await _adopt(engine, 1, 0.5)
        tasks = _begin_many(engine, 8, max_tokens=4)
        await until(lambda: len(server.engine.names) == 8)
        _allow(server, MANY)
        results = await asyncio.gather(*tasks)
        assert {result.version_runs for result in results} == {((1, 4),)}
        assert server.num_groups == 1


async def test_a_group_has_a_bounded_number_of_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_module, "_GATHER_S", _GATHERS_ALL_S)
    monkeypatch.setattr(groups_module, "_MAX_SEGMENTS", 3)
    async with _serving() as ((server,), engine):
        await _adopt(engine, 1, 0.5)
        tasks = _begin_many(engine, 7, max_tokens=2)
        _allow(server, MANY)
        await asyncio.gather(*tasks)
        assert server.num_groups == 3


async def test_a_group_has_a_bounded_number_of_context_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(groups_module, "_GATHER_S", _GATHERS_ALL_S)
    monkeypatch.setattr(groups_module, "_MAX_TOKENS", 4)
    async with _serving() as ((server,), engine):
        await _adopt(engine, 1, 0.5)
        tasks = _begin_many(engine, 4, max_tokens=2)
        _allow(server, MANY)
        await asyncio.gather(*tasks)
        assert server.num_groups == 2


def _images(value: float) -> ModelInputs:
    return ModelInputs.from_values(
        {
            "pixel_values": torch.full((4, 6), value),
            "image_grid_thw": torch.tensor([[1, 2, 2]]),
            "image_places": torch.tensor([[0, 0]]),
        }
    )


@asynccontextmanager
async def _serving_images() -> AsyncIterator[tuple[TokenServer, FleetEngine]]:
    """Yields a server whose engine takes images, as its requests show, and the engine that attached."""
    server = TokenServer()
    await server.start()
    server.engine.image_inputs = lambda token_ids, images: {  # type: ignore[attr-defined]
        "pixels": images.tensors["pixel_values"].tolist()
    }
    config = replace(engine_config([server], []), images=ImageLimits(max_images=2, max_tokens=4))
    model = server.engine.vllm_config.model_config
    model.hf_config = SimpleNamespace(**{MAX_IMAGE_TOKENS: 4})
    model.multimodal_config = SimpleNamespace(get_limit_per_prompt={"image": 2}.get)
    try:
        engine = build(config)
        async with running(engine), asyncio.timeout(30):
            await until(lambda: len(engine.backend.fleet.attached) == 1, poll_s=0.005)
            yield server, engine
    finally:
        await server.close()


async def test_images_of_a_group_travel_once_to_each_of_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(groups_module, "_GATHER_S", _GATHERS_ALL_S)
    sent: list[dict[str, Any]] = []
    exchange = groups_module._TokenGroup._exchange

    async def record(group: Any, body: Any) -> None:
        sent.append(body)
        await exchange(group, body)

    monkeypatch.setattr(groups_module._TokenGroup, "_exchange", record)
    async with _serving_images() as (server, engine):
        await _adopt(engine, 1, 0.5)
        _allow(server, MANY)
        inputs = [_images(1.0), _images(1.0), _images(2.0), None]
        tasks = [
            engine.generate(request(f"r{n}", (1, 2), max_tokens=2, model_inputs=images))
            for n, images in enumerate(inputs)
        ]
        await asyncio.gather(*tasks)
        (body,) = sent
        assert len(body["model_inputs"]) == 2
        pixels = [prompt.get("pixels") for prompt in server.engine.requests]
        assert pixels == [[[1.0] * 6] * 4, [[1.0] * 6] * 4, [[2.0] * 6] * 4, None]


async def test_a_group_has_a_bounded_number_of_image_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_module, "_GATHER_S", _GATHERS_ALL_S)
    monkeypatch.setattr(groups_module, "_MAX_IMAGE_BYTES", 200)
    async with _serving_images() as (server, engine):
        await _adopt(engine, 1, 0.5)
        _allow(server, MANY)
        tasks = [
            engine.generate(request(f"r{n}", (1, 2), max_tokens=2, model_inputs=_images(float(n))))
            for n in range(4)
        ]
        await asyncio.gather(*tasks)
        assert server.num_groups == 2


async def test_groups_that_the_engine_has_not_received_have_a_bounded_sum_of_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    max_bytes, lengths, num_passed, may_pass = 3000, list[int](), 0, asyncio.Event()
    monkeypatch.setattr(answers_module, "_MAX_GROUPS_BYTES", max_bytes)
    monkeypatch.setattr(groups_module, "_MAX_IMAGE_BYTES", 1)  # each segment is a group

    class Room(answers_module.GroupRoom):
        @asynccontextmanager
        async def taken(self, request: Request) -> AsyncIterator[Callable[[], None]]:
            lengths.append(int(request.headers["content-length"]))
            async with super().taken(request) as free:
                yield free

    monkeypatch.setattr(server_module, "GroupRoom", Room)
    async with _serving_images() as (server, engine):
        await _adopt(engine, 1, 0.5)
        _allow(server, MANY)
        add = server.engine.add_request_async

        async def add_later(added_request: Any) -> None:
            nonlocal num_passed
            num_passed += 1
            await may_pass.wait()
            await add(added_request)

        monkeypatch.setattr(server.engine, "add_request_async", add_later)
        tasks = [
            asyncio.ensure_future(
                engine.generate(
                    request(f"r{n}", (1, 2), max_tokens=2, model_inputs=_images(float(n)))
                )
            )
            for n in range(8)
        ]
        await until(lambda: len(lengths) == 8)
        num_within = sum(total <= max_bytes for total in accumulate(lengths))
        assert 0 < num_within < 8
        await until(lambda: num_passed == num_within)
        for _ in range(20):  # requests that need not wait would go on meanwhile
            await asyncio.sleep(0.005)
        assert num_passed == num_within
        may_pass.set()
        results = await asyncio.gather(*tasks)
        assert [len(result.token_ids) for result in results] == [2] * 8


async def test_a_group_for_which_no_room_is_left_in_time_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answers_module, "_MAX_GROUPS_BYTES", 1)  # one group at a time
    monkeypatch.setattr(answers_module, "_ROOM_S", 0.01)
    monkeypatch.setattr(groups_module, "_MAX_IMAGE_BYTES", 1)
    async with _serving_images() as (server, engine):
        await _adopt(engine, 1, 0.5)
        _allow(server, MANY)
        add, may_pass, num_refused = server.engine.add_request_async, asyncio.Event(), 0

        async def add_later(added_request: Any) -> None:
            await may_pass.wait()
            await add(added_request)

        def refused(status: int, message: str) -> RefusedError:
            nonlocal num_refused
            num_refused += status == 429
            return RefusedError(status, message)

        monkeypatch.setattr(server.engine, "add_request_async", add_later)
        monkeypatch.setattr(answers_module, "RefusedError", refused)
        tasks = [
            asyncio.ensure_future(
                engine.generate(
                    request(f"r{n}", (1, 2), max_tokens=2, model_inputs=_images(float(n)))
                )
            )
            for n in range(2)
        ]
        await until(lambda: num_refused > 0)
        may_pass.set()
        results = await asyncio.gather(*tasks)
        assert [len(result.token_ids) for result in results] == [2] * 2


@pytest.mark.parametrize("images", ["x", {"d": 5}, {"d": "!"}, {"d": "AAAA"}, {}])
async def test_malformed_images_are_refused(images: Any) -> None:
    async with _serving_images() as (server, engine):
        await _adopt(engine, 1, 0.5)
        (client,) = engine.backend.fleet.serving
        content = {"token_ids": [1], "sampling_params": {"max_tokens": 1}, "model_inputs": "d"}
        body = {"group": "g", "requests": [[0, content]], "model_inputs": images}
        async with client.stream(body) as response:
            assert response.status_code == 400
        assert server.engine.names == []


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (ImageLimits(max_images=3, max_tokens=4), "--max-images 3 --max-image-tokens 4"),
        (ImageLimits(max_images=2, max_tokens=5), "--max-images 2 --max-image-tokens 5"),
    ],
)
async def test_a_server_with_lower_limits_of_images_is_refused(
    limits: ImageLimits, message: str
) -> None:
    async with _serving_images() as (_, engine):
        (client,) = engine.backend.fleet.attached
        config = replace(engine_config([], []), images=limits)
        (problem,) = [problem for problem in client.problems(config) if "images" in problem]
        assert problem.endswith(message)


async def test_a_prompt_with_images_has_no_score() -> None:
    async with _serving_images() as (_, engine):
        await _adopt(engine, 1, 0.5)
        with pytest.raises(ValueError, match="scores texts without images only"):
            await engine.score((1, 2), _images(1.0))


@pytest.mark.parametrize("gather_s", [0.003, _GATHERS_ALL_S])
async def test_the_abort_of_one_response_leaves_the_others_of_its_group(
    monkeypatch: pytest.MonkeyPatch, gather_s: float
) -> None:
    monkeypatch.setattr(groups_module, "_GATHER_S", gather_s)
    has_begun = gather_s < 0.1
    async with _serving() as ((server,), engine):
        await _adopt(engine, 1, 0.5)
        tasks = _begin_many(engine, 3, max_tokens=4)
        if has_begun:
            await until(lambda: len(server.engine.names) == 3)
        else:
            await until(lambda: engine.stats().num_running == 3)
            await asyncio.sleep(0.05)
        await engine.abort({"r1"})
        assert (await tasks[1]).finish_reason == "aborted"
        if has_begun:
            await until(lambda: len(server.engine.aborted) == 1)
        _allow(server, MANY)
        for task in (tasks[0], tasks[2]):
            assert (await task).version_runs == ((1, 4),)
        assert len(server.engine.names) == (3 if has_begun else 2)
        assert server.engine.aborted == server.engine.names[1:2] * has_begun


async def test_an_abort_waits_until_the_server_has_begun_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(groups_module, "_GATHER_S", 0.1)
    async with _serving() as ((server,), engine):
        await _adopt(engine, 1, 0.5)
        server.can_answer.clear()
        tasks = _begin_many(engine, 3, max_tokens=4)
        await until(lambda: server.num_groups == 1)
        await engine.abort({"r1"})
        assert (await tasks[1]).finish_reason == "aborted"
        await asyncio.sleep(0.1)  # a cut that did not wait would be ignored by now
        server.can_answer.set()
        await until(lambda: server.engine.aborted == server.engine.names[1:2] != [])
        _allow(server, MANY)
        for task in (tasks[0], tasks[2]):
            assert (await task).version_runs == ((1, 4),)


async def test_a_group_without_segments_sends_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_module, "_GATHER_S", 0.2)
    async with _serving() as ((server,), engine):
        await _adopt(engine, 1, 0.5)
        tasks = _begin_many(engine, 2, max_tokens=4)
        await until(lambda: engine.stats().num_running == 2)
        await engine.abort()
        assert [(await task).finish_reason for task in tasks] == ["aborted"] * 2
        await asyncio.sleep(0.4)
        assert server.num_groups == 0


async def test_all_responses_of_a_group_go_on_after_their_connection_was_reset() -> None:
    async with _serving() as ((server,), engine):
        await _adopt(engine, 1, 0.5)
        tasks = _begin_many(engine, 5, max_tokens=4)
        await until(lambda: len(server.engine.names) == 5)
        server.reset_connections()
        await until(lambda: len(server.engine.aborted) == 5)
        _allow(server, MANY)
        results = await asyncio.gather(*tasks)
        assert {result.version_runs for result in results} == {((1, 4),)}


async def test_requests_that_arrive_while_a_version_is_withdrawn_are_not_sampled() -> None:
    async with _serving() as ((server,), engine):
        await _adopt(engine, 1, 0.5)
        tokens = server_tokens(server)
        adding = asyncio.Event()
        add = server.engine.add_request_async

        async def add_slowly(added: Any) -> None:
            await add(added)
            if not adding.is_set():
                adding.set()
                await asyncio.sleep(0.05)

        server.engine.add_request_async = add_slowly  # type: ignore[method-assign]
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            await asyncio.Event().wait()

        content = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3}}
        body = {"group": "g", "requests": [[number, content] for number in range(3)]}
        responding = asyncio.ensure_future(tokens.respond(body, receive, send))
        await adding.wait()
        tokens.cut()
        await responding
        assert len(server.engine.names) == 1
        lines = b"".join(message.get("body", b"") for message in sent).splitlines()
        assert [json.loads(line)[::5] for line in sorted(lines)] == [
            [number, "abort"] for number in range(3)
        ]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"group": "g"},
        {"group": "g", "requests": []},
        {"group": "g", "requests": [[0]]},
        {"group": "g", "requests": [["x", {}]]},
        {"group": "g", "requests": [[0, {"token_ids": [], "sampling_params": {}}]]},
    ],
)
async def test_a_malformed_group_is_refused(body: dict[str, Any]) -> None:
    async with _serving() as ((server,), engine):
        await _adopt(engine, 1, 0.5)
        (client,) = engine.backend.fleet.serving
        async with client.stream(body) as response:
            assert response.status_code == 400
        assert server.engine.names == []


async def test_a_malformed_cut_is_refused() -> None:
    async with _serving() as ((_,), engine):
        await _adopt(engine, 1, 0.5)
        (client,) = engine.backend.fleet.serving
        headers = client.request_headers()
        status, _, _ = await client.send("POST", CUT, {"group": "g"}, headers=headers)
        assert status == 400
        body = {"group": "unknown", "numbers": [0]}
        status, _, _ = await client.send("POST", CUT, body, headers=headers)
        assert status == 200


async def test_responses_of_the_owner_before_are_cut() -> None:
    async with _serving() as ((server,), engine):
        await _adopt(engine, 1, 0.5)
        task = _begin(engine, 4)
        _allow(server, 2)
        await until(lambda: engine.stats().tokens_total == 2)
        async with attached(server):
            await until(lambda: server.engine.aborted == server.engine.names)
        _allow(server, MANY)
        result = await task
        assert result.version_runs == ((1, 4),)
        assert server.engine.num_sampled == 4


async def test_a_client_that_leaves_in_the_middle_of_its_request_is_no_error() -> None:
    async with _serving() as ((server,), engine):
        await _adopt(engine, 1, 0.5)
        (client,) = engine.backend.fleet.serving
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = {"authorization": f"Bearer {TOKEN}", **client.request_headers()}
        assert server.app is not None
        await server.app(
            {
                "type": "http",
                "method": "POST",
                "path": GENERATE,
                "query_string": b"",
                "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
            },
            receive,
            send,
        )
        assert sent == []
        assert server.engine.names == []


@pytest.mark.parametrize(
    "line",
    [
        b"{}",
        b"[1]",
        b"[0, [1], [], [[1, 1]], 0, null]",
        b"[0, [1], [0.5], [[1, 2]], 0, null]",
        b'["x", [], [], [], 0, null]',
        b"\xff",
    ],
)
def test_a_line_of_another_form_is_refused(line: bytes) -> None:
    with pytest.raises((TypeError, ValueError)):
        read_token_line(line)


async def test_a_line_of_another_form_sends_the_request_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = iter([b"no list\n"])
    read = groups_module.read_token_line

    def malformed_once(line: bytes) -> Any:
        return read(next(lines, line))

    monkeypatch.setattr(groups_module, "read_token_line", malformed_once)
    async with _serving() as ((server,), engine):
        await _adopt(engine, 1, 0.5)
        _allow(server, MANY)
        result = await _begin(engine, 4)
        assert result.version_runs == ((1, 4),)
        assert len(server.engine.requests) == 2
