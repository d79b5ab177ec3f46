"""Servers, their router and the rollout die, freeze and lose their links: no token is lost or misnamed.

``tests.faults.fleets`` does the same to processes of a run that trains.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from services.extras.fleets import client as client_module
from services.extras.fleets import fleet as fleet_module
from services.extras.fleets import stream as stream_module
from services.extras.fleets.engine import FleetEngine
from services.extras.fleets.sglang_server import build as build_sglang
from services.extras.fleets.vllm_server import build as build_vllm
from services.rollout.engines.base import GenerationResult
from tests.helpers.engines import request, running, until
from tests.helpers.links import Link
from tests.helpers.logprob_check import check_logprobs
from tests.unit.extras.fleets.servers import TOKEN, FakeServer, engine_config, router
from tests.unit.extras.fleets.sglang_servers import SglangFake
from tests.unit.extras.fleets.test_fleet import _adopt, _allow, _value

ROUNDS, VERSIONS_PER_ROUND = 2, 5
TOKENS = 6
_KINDS = ("kill", "replace", "cut", "freeze")
_ANSWER_TIMEOUT_S = 0.3
_FREEZE_S = (0.05, 0.6)
"""Shorter and longer than the time-out of an answer."""


@pytest.fixture(autouse=True)
def fast_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    # So seldom that requests reach a server that was replaced before a check does.
    monkeypatch.setattr(fleet_module, "_PROBE_EVERY_S", 0.2)
    monkeypatch.setattr(fleet_module, "_MAX_WAIT_S", 0.2)
    monkeypatch.setattr(fleet_module, "_GRACE_S", 0.5)
    monkeypatch.setattr(fleet_module, "_OVERLOAD_DELAYS_S", (0.001, 0.01))
    monkeypatch.setattr(stream_module, "_RETRY_S", 0.01)
    for method in (client_module.FleetServer.ask, client_module.FleetServer.send):
        monkeypatch.setitem(method.__kwdefaults__, "timeout_s", _ANSWER_TIMEOUT_S)


class Faults:
    """Two servers and a router behind links, and what can happen to them.

    Attributes:
        address: Address of the router.
        links: Links to the servers and to the router.
        counts: Number of faults of each kind so far.
    """

    def __init__(self, servers: Sequence[FakeServer], links: Sequence[Link], seed: int) -> None:
        self.address = links[-1].address
        self.servers, self.links = servers, links
        self.counts: dict[str, int] = {}
        self.engine: FleetEngine | None = None
        """The rollout's engine; None while it has none."""
        self.is_over = False
        self._changing = asyncio.Lock()
        self._draws = random.Random(seed)

    async def make(self) -> None:
        """Makes faults of all kinds in turns until they are over; a server serves before each."""
        kinds = list(_KINDS)
        while not self.is_over:
            self._draws.shuffle(kinds)
            for kind in kinds:
                targets = self.links if kind in ("cut", "freeze") else self.servers
                index = self._draws.randrange(len(targets))
                await until(self._may_go_on, poll_s=0.005)
                if self.is_over:
                    return
                async with self._changing:
                    await self._make(kind, index)
                self.counts[kind] = self.counts.get(kind, 0) + 1
                await asyncio.sleep(self._draws.uniform(0.01, 0.1))

    def _may_go_on(self) -> bool:
        return self.is_over or bool(self.engine and self.engine.backend.fleet.serving)

    @asynccontextmanager
    async def without_links(self) -> AsyncIterator[None]:
        """Cuts all links while the block runs."""
        async with self._changing:
            for link in self.links:
                link.cut()
            yield
            for link in self.links:
                link.restore()

    async def _make(self, kind: str, index: int) -> None:
        if kind == "kill":
            await self.servers[index].restart()
            return
        if kind == "replace":
            self.servers[index].replace()
            return
        link = self.links[index]
        try:
            (link.cut if kind == "cut" else link.freeze)()
            await asyncio.sleep(self._draws.choice(_FREEZE_S))
        finally:
            link.restore()


@asynccontextmanager
async def _faults(make: Callable[[], FakeServer], seed: int) -> AsyncIterator[Faults]:
    async with AsyncExitStack() as stack:
        servers = [make() for _ in range(2)]
        for server in servers:
            await server.start()
            stack.push_async_callback(server.close)
        links = [Link(server.port) for server in servers]
        listing = await stack.enter_async_context(router([link.address for link in links]))
        links.append(Link(int(listing[0].rpartition(":")[2])))
        serving = [asyncio.ensure_future(link.serve()) for link in links]
        try:
            yield Faults(servers, links, seed)
        finally:
            for task in serving:
                task.cancel()
            await asyncio.wait(serving)


async def _sample(engine: FleetEngine, number: int, results: list[GenerationResult]) -> None:
    """Sends requests one after the other."""
    for index in range(1000):
        generation = request(f"r{number}.{index}", (number, 2), max_tokens=TOKENS)
        results.append(await engine.generate(generation))


async def _serve_round(
    engine: FleetEngine, faults: Faults, versions: Sequence[int], results: list[GenerationResult]
) -> None:
    """Adopts versions while requests run and faults happen; then the rollout dies without a word."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running(engine))
        await engine.wait_ready()
        await _adopt(engine, versions[0], _value(versions[0]))
        faults.engine = engine
        tasks = [asyncio.ensure_future(_sample(engine, number, results)) for number in range(4)]
        try:
            for version in versions[1:]:
                num_results = len(results)
                await _adopt(engine, version, _value(version))
                await until(lambda most=num_results: len(results) >= most + 4, poll_s=0.005)
                for task in tasks:
                    if task.done():
                        task.result()
            await until(lambda: faults.counts.keys() == set(_KINDS), poll_s=0.005)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            faults.engine = None
        async with faults.without_links():
            await stack.aclose()


@pytest.mark.parametrize(("make", "build"), [(FakeServer, build_vllm), (SglangFake, build_sglang)])
@pytest.mark.parametrize(
    "rounds", [ROUNDS, pytest.param(40, marks=[pytest.mark.nightly, pytest.mark.timeout(1200)])]
)
async def test_no_token_is_lost_or_misnamed_through_kills_freezes_and_cut_links(
    make: Callable[[], FakeServer], build: Callable[..., FleetEngine], rounds: int
) -> None:
    results: list[GenerationResult] = []
    async with _faults(make, seed=rounds) as faults, asyncio.timeout(60 * rounds):

        async def allow() -> None:
            while True:
                _allow(list(faults.servers), 1)
                await asyncio.sleep(0.002)

        allowing, making = asyncio.ensure_future(allow()), asyncio.ensure_future(faults.make())
        try:
            for number in range(rounds):
                first = number * VERSIONS_PER_ROUND
                arguments = {"addresses": [faults.address], "token": TOKEN}
                engine = build(engine_config([], [], arguments=arguments))
                versions = range(first, first + VERSIONS_PER_ROUND)
                await _serve_round(engine, faults, versions, results)
        finally:
            faults.is_over = True
            await making
            allowing.cancel()
    for result in results:
        assert (len(result.token_ids), result.finish_reason) == (TOKENS, "length")
        versions = [version for version, count in result.version_runs for _ in range(count)]
        assert list(result.logprobs) == [-_value(version) for version in versions]
    sampled = {version for result in results for version, _ in result.version_runs}
    assert len(sampled) > rounds * VERSIONS_PER_ROUND / 2


def _metrics(folder: Path, *steps: dict[str, float]) -> Path:
    (folder / "run_1").mkdir()
    (folder / "run_1" / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
    return folder


def test_the_largest_divergence_of_fresh_tokens_is_checked(tmp_path: Path) -> None:
    name = "kl_rollout_by_staleness/"
    state = _metrics(tmp_path, {f"{name}0": 1e-9, f"{name}1": 0.3}, {f"{name}0": 2e-9})
    assert check_logprobs(state) == {"kl_of_fresh_tokens": 2e-9, "kl_of_older_tokens": 0.3}


@pytest.mark.parametrize("step", [{}, {"0": 1e-3}, {"0": float("nan")}, {"1": 0.1}])
def test_wrong_or_missing_fresh_tokens_are_a_failure(
    tmp_path: Path, step: dict[str, float]
) -> None:
    metrics = {f"kl_rollout_by_staleness/{age}": value for age, value in step.items()}
    with pytest.raises(AssertionError):
        check_logprobs(_metrics(tmp_path, metrics))
