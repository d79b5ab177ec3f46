"""The engines vllm-server and sglang-server, attached to two real servers on the CPU."""

import asyncio
import importlib.util
import inspect
import itertools
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from services.extras.fleets.engine import FleetEngine
from services.extras.fleets.local import (
    TOKEN,
    LocalServer,
    LocalSglang,
    LocalVllm,
    local_servers,
)
from services.rollout.engines.base import Engine, EngineDiedError
from tests.contract import test_engine_contract, test_engine_weights
from tests.contract.checks import PROMPT, adopt, assert_agrees
from tests.contract.engines import expected_logprobs, model_config, weights
from tests.contract.fleets import assert_equal, attached, fleet_engine
from tests.helpers.direct_weights import FleetSink
from tests.helpers.engines import begun, made, request, until
from tests.helpers.ports import free_port
from tests.helpers.weight_members import Cluster

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

_OTHERWISE = {
    # vLLM's servers do not say how many tokens were cached.
    "test_prefixes_that_were_computed_before_are_counted",
    "test_what_follows_a_response_finds_what_was_computed_again_for_it",
    # Servers sample while weights travel, so that the requests of these tests end before the updates; see
    # the test of updates in the middle of responses below.
    "test_updates_in_the_middle_of_generation_give_exact_versions",
    "test_many_updates_in_a_row_meet_running_waiting_and_aborted_requests",
}


def _contract(module: ModuleType) -> dict[str, Callable[..., Any]]:
    tests = {name: test for name, test in vars(module).items() if name.startswith("test_")}
    return {name: test for name, test in tests.items() if name not in _OTHERWISE}


CONTRACT = _contract(test_engine_contract) | _contract(test_engine_weights)
_TIMEOUT_S = 300
_DRAIN_S = 60
"""Longest drain of a server whose requests take a second; it waits as long as its clients send work."""


def _kind(package: str, kind: type[LocalServer], *options: str) -> Any:
    is_missing = importlib.util.find_spec(package) is None
    mark = pytest.mark.skipif(is_missing, reason=f"{package} is not installed here")
    return pytest.param((kind, options), id=kind.engine, marks=mark)


KINDS = [
    _kind(
        "vllm",
        LocalVllm,
        *("--max-model-len", "512", "--max-num-batched-tokens", "512"),
        *("--kv-cache-memory-bytes", str(64 << 20)),
        *("--shutdown-timeout", "300"),
    ),
    _kind("sglang", LocalSglang, "--max-running-requests", "8"),
]


@pytest.fixture(scope="module", params=KINDS)
def servers(request: pytest.FixtureRequest) -> Iterator[list[LocalServer]]:
    """Two servers, which all tests share because their start takes long."""
    kind, options = request.param
    with local_servers(kind, model_config(), 2, "--dtype", "float32", *options) as started:
        yield started


def _engine(
    servers: list[LocalServer], events: list[str] | None = None, **changes: Any
) -> FleetEngine:
    def report(kind: str, message: str) -> None:
        if events is not None:
            events.append(f"{kind}: {message}")

    return fleet_engine(servers, report=report, **changes)


@pytest.mark.parametrize("name", CONTRACT)
async def test_servers_keep_the_contract_of_engines(name: str, servers: list[LocalServer]) -> None:
    @asynccontextmanager
    async def opened(*, tied: bool = True) -> AsyncIterator[Engine]:
        assert tied, "the servers' model has tied embeddings"
        async with attached(_engine(servers), 2) as engine:
            yield engine

    opener: Callable[..., AbstractAsyncContextManager[Engine]] = opened
    takes_tied = "tied" in inspect.signature(CONTRACT[name]).parameters
    await CONTRACT[name](opener, **({"tied": True} if takes_tied else {}))


async def test_five_updates_are_exact_on_every_server(servers: list[LocalServer]) -> None:
    async with attached(_engine(servers), 2) as engine:
        for version in range(5):
            await adopt(engine, version)
            fleet = engine.backend.fleet.serving
            assert [server.version for server in fleet] == [version, version]
            assert len({server.digest for server in fleet}) == 1
            tasks = begun(engine, [PROMPT[:7], PROMPT[:11], PROMPT[:13]], max_tokens=12)
            for context, task in zip((7, 11, 13), tasks, strict=True):
                result = await task
                assert result.version_runs == ((version, 12),)
                expected = expected_logprobs(version, PROMPT[:context], result.token_ids)
                assert_equal(result.logprobs, expected)
            expected = expected_logprobs(version, PROMPT[:1], PROMPT[1:])
            assert_equal(await engine.score(PROMPT), expected)


async def test_five_updates_from_the_trainer_are_exact_on_every_server(
    servers: list[LocalServer],
) -> None:
    if servers[0].engine != "vllm-server":
        pytest.skip("only vLLM's workers receive weights from the trainer")
    async with attached(_engine(servers), 2) as engine:
        cluster = Cluster(
            mode="servers",
            specs=tuple(engine.weight_specs()),
            sinks=[FleetSink(engine)],
            backend="servers",
            bucket_bytes=1 << 16,
            timeout_s=30,
        )
        await cluster.form_group()
        fleet = engine.backend.fleet
        for version in range(5):
            for name, tensor in weights(version).items():
                cluster.weights[name].copy_(tensor)
            digest = await cluster.send(version)
            await cluster.receivers[0].adopt(version, digest)
            await until(lambda: len(fleet.serving) == 2, poll_s=0.01)
            assert {(server.version, server.digest) for server in fleet.serving} == {
                (version, digest)
            }
            prompts = [PROMPT[:7], PROMPT[:11]]
            for prompt, task in zip(prompts, begun(engine, prompts, max_tokens=12), strict=True):
                result = await task
                assert result.version_runs == ((version, 12),)
                expected = expected_logprobs(version, prompt, result.token_ids)
                assert_equal(result.logprobs, expected)
            expected = expected_logprobs(version, PROMPT[:1], PROMPT[1:])
            assert_equal(await engine.score(PROMPT), expected)
            if version == 1:
                # The trainer sends the version again to the server that lost it.
                servers[0].kill()
                servers[0].start()
                await asyncio.to_thread(servers[0].wait)
                await until(
                    lambda: (
                        {server.digest for server in fleet.serving} == {digest}  # noqa: B023
                        and len(fleet.serving) == 2
                    ),
                    poll_s=0.05,
                )
        for member in cluster.members:
            await member.abort(1, "the test has ended")


async def test_updates_in_the_middle_of_responses_give_exact_versions(
    servers: list[LocalServer],
) -> None:
    async with attached(_engine(servers), 2) as engine:
        await adopt(engine, 0)
        tasks = begun(engine, [PROMPT[: 5 + seed] for seed in range(8)], max_tokens=480)
        for version in range(1, 5):
            await until(made(engine, 8))
            await adopt(engine, version)
        await engine.abort({"r0"})
        results = [await task for task in tasks]
        assert engine.stats().weight_version == 4
    for seed, result in enumerate(results):
        assert_agrees(result, PROMPT[: 5 + seed])
    assert sum(len(result.version_runs) > 1 for result in results) >= 6


async def test_siblings_of_a_group_share_a_server_and_groups_are_spread(
    servers: list[LocalServer],
) -> None:
    async with attached(_engine(servers), 2) as engine:
        await adopt(engine, 0)
        contexts = [PROMPT[:20]] * 4 + [PROMPT[1:20]] * 4
        tasks = begun(engine, contexts, max_tokens=200)
        await until(made(engine, 40))
        assert [server.num_running for server in engine.backend.fleet.serving] == [4, 4]
        await engine.abort()
        await asyncio.gather(*tasks)


@contextmanager
def _router(servers: Sequence[LocalServer], folder: Path) -> Iterator[str]:
    """Yields the address of SGLang's router, which lists servers."""
    port, metrics_port = free_port(), free_port()
    command = [
        *(sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"),
        *("--port", str(port), "--prometheus-port", str(metrics_port), "--api-key", TOKEN),
        *("--worker-urls", *[server.address for server in servers]),
    ]
    with (folder / "router.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


async def test_a_router_is_asked_for_its_servers(
    servers: list[LocalServer], tmp_path: Path
) -> None:
    if servers[0].engine != "sglang-server":
        pytest.skip("vLLM's router is not installed here")
    pytest.importorskip("sglang_router", reason="SGLang's router is not installed here")
    events: list[str] = []
    with _router(servers, tmp_path) as address:
        arguments = {"addresses": [address], "token": TOKEN, "context_length": 506}
        async with attached(_engine(servers, events, arguments=arguments), 2) as engine:
            await adopt(engine, 0)
            results = await asyncio.gather(
                *begun(engine, [PROMPT[: 5 + seed] for seed in range(8)], max_tokens=20)
            )
            for seed, result in enumerate(results):
                assert_agrees(result, PROMPT[: 5 + seed])
            fleet = {server.address for server in engine.backend.fleet.serving}
            assert fleet == {server.address for server in servers}
    assert any(event.startswith(f"EngineRouterListed: {address} lists") for event in events)


async def test_a_server_that_another_run_uses_is_refused_by_name(
    servers: list[LocalServer],
) -> None:
    async with attached(_engine(servers), 2) as engine:
        await adopt(engine, 0)
        second_engine = _engine(servers, worker="another")
        with pytest.raises(EngineDiedError, match="'test' uses this server"):
            await second_engine.run()
        result = await engine.generate(request("r", PROMPT))
        assert_agrees(result, PROMPT)


async def test_a_server_that_lacks_what_the_run_needs_is_refused_by_name(
    servers: list[LocalServer],
) -> None:
    engine = _engine(servers, dtype=torch.bfloat16)
    with pytest.raises(EngineDiedError, match="dtype is 'float32'"):
        await engine.run()


async def test_a_killed_server_loses_no_response_and_returns_with_the_newest_weights(
    servers: list[LocalServer],
) -> None:
    events: list[str] = []
    killed, survivor = servers
    async with attached(_engine(servers, events), 2) as engine:
        await adopt(engine, 0)
        await engine.score(PROMPT)
        tasks = begun(engine, [PROMPT[: 5 + seed] for seed in range(6)], max_tokens=480)
        await until(made(engine, 30))
        killed.kill()
        await until(made(engine, 30))
        await adopt(engine, 1)
        for seed, task in enumerate(tasks):
            result = await task
            assert len(result.token_ids) == 480
            assert {version for version, _ in result.version_runs} == {0, 1}
            assert_agrees(result, PROMPT[: 5 + seed])
        assert [server.address for server in engine.backend.fleet.serving] == [survivor.address]
        (loss_event,) = events
        assert loss_event.startswith(f"EngineServerLost: {killed.address} gets no work")
        killed.start()
        async with asyncio.timeout(_TIMEOUT_S):
            while len(engine.backend.fleet.serving) < 2:  # noqa: ASYNC110 -- a process loads
                await asyncio.sleep(0.1)
        assert events[1:] == [f"EngineServerServes: {killed.address} serves version 1"]
        results = await asyncio.gather(
            *begun(engine, [PROMPT[: 5 + seed] for seed in range(8)], max_tokens=20)
        )
        for seed, result in enumerate(results):
            assert result.version_runs == ((1, 20),)
            assert_agrees(result, PROMPT[: 5 + seed])


async def test_a_drained_server_gets_no_further_work_and_returns_with_the_newest_weights(
    servers: list[LocalServer],
) -> None:
    events: list[str] = []
    drained, other = servers
    async with attached(_engine(servers, events), 2) as engine:
        fleet = engine.backend.fleet
        await adopt(engine, 0)
        results: list[tuple[tuple[int, ...], Any]] = []

        async def sample(number: int) -> None:
            """Sends requests one after the other, so that the server is never idle by itself."""
            for index in itertools.count():
                context = PROMPT[: 5 + number]
                name = f"{number}.{index}"
                result = await engine.generate(request(name, context, seed=index, max_tokens=60))
                results.append((context, result))

        sampling = [asyncio.ensure_future(sample(number)) for number in range(6)]
        await until(lambda: all(server.num_running for server in fleet.serving), poll_s=0.01)
        await asyncio.to_thread(drained.drain, _DRAIN_S)
        assert [server.address for server in fleet.serving] == [other.address]
        await adopt(engine, 1)
        before = len(results)
        drained.start()
        async with asyncio.timeout(_TIMEOUT_S):
            while len(fleet.serving) < 2:  # noqa: ASYNC110 -- a process loads
                await asyncio.sleep(0.1)
        await until(lambda: all(server.num_running for server in fleet.serving), poll_s=0.01)
        await until(lambda: len(results) >= before + 12, poll_s=0.01)
        for task in sampling:
            assert not task.done()
            task.cancel()
        await asyncio.wait(sampling)
    for context, result in results:
        assert len(result.token_ids) == 60
        assert_agrees(result, context)
    lost, serves = events
    assert lost.startswith(f"EngineServerLost: {drained.address} gets no work")
    assert serves == f"EngineServerServes: {drained.address} serves version 1"


async def test_weights_that_a_run_before_left_are_never_sampled_from(
    servers: list[LocalServer],
) -> None:
    async with attached(_engine(servers), 2) as engine:
        await adopt(engine, 3)
    async with attached(_engine(servers), 2) as engine:
        task = asyncio.ensure_future(engine.generate(request("early", PROMPT, max_tokens=5)))
        await asyncio.sleep(0.1)
        assert not task.done()
        await engine.adopt_weights(3, weights(4))
        result = await task
        expected = expected_logprobs(4, PROMPT, result.token_ids)
        assert_equal(result.logprobs, expected)
