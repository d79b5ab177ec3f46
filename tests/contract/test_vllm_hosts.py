"""A vLLM server on the CPU whose engine spans two hosts, each with one of its two tensor-parallel ranks."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.extras.fleets.engine import FleetEngine
from services.extras.fleets.local import LocalVllm, local_servers
from services.weightsync.adapters import FROZEN_DIGEST, frozen_digest
from services.weightsync.weight_plan import LORA_DOWN, LORA_UP
from tests.contract.checks import PROMPT, adopt, assert_agrees
from tests.contract.engines import (
    expected_logprobs,
    make_model,
    model_config,
    weights,
)
from tests.contract.fleets import assert_equal, attached, fleet_engine
from tests.helpers.direct_weights import FleetSink
from tests.helpers.engines import begun, made, until
from tests.helpers.ports import free_port
from tests.helpers.two_hosts import FURTHER_ADDRESS, OverTwoHosts, require_namespaces
from tests.helpers.weight_members import Cluster

pytest.importorskip("vllm", reason="vllm is not installed here")
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

_OPTIONS = ("--dtype", "float32", "--max-model-len", "512", "--max-num-batched-tokens", "512")
_CACHE = ("--kv-cache-memory-bytes", str(64 << 20), "--max-num-seqs", "8")


class TwoHosts(OverTwoHosts, LocalVllm):
    """A server whose second tensor-parallel rank is on another host."""

    def start(self) -> None:
        group = (
            *("--tensor-parallel-size", "2", "--nnodes", "2"),
            *("--master-addr", "127.0.0.1", "--master-port", str(free_port())),
        )
        self.start_ranks(
            [*group, "--node-rank", "0"],
            [*group, "--node-rank", "1", "--headless"],
            {"VLLM_HOST_IP": FURTHER_ADDRESS},
        )

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, "VLLM_HOST_IP": "127.0.0.1"}


@pytest.fixture(scope="module")
def server() -> Iterator[TwoHosts]:
    """One server, which the tests of whole weights share because its start takes long."""
    require_namespaces()
    with local_servers(TwoHosts, model_config(), 1, *_OPTIONS, *_CACHE) as (started,):
        assert isinstance(started, TwoHosts)
        yield started


async def _assert_serves(engine: FleetEngine, version: int) -> None:
    prompts = [PROMPT[:7], PROMPT[:11]]
    for prompt, task in zip(prompts, begun(engine, prompts, max_tokens=12), strict=True):
        result = await task
        assert result.version_runs == ((version, 12),)
        assert_equal(result.logprobs, expected_logprobs(version, prompt, result.token_ids))
    assert_equal(await engine.score(PROMPT), expected_logprobs(version, PROMPT[:1], PROMPT[1:]))


async def test_five_updates_are_exact_in_the_workers_of_both_hosts(server: TwoHosts) -> None:
    async with attached(fleet_engine([server]), 1) as engine:
        for version in range(5):
            await adopt(engine, version)
            await _assert_serves(engine, version)


async def test_five_updates_from_the_trainer_are_exact_in_the_workers_of_both_hosts(
    server: TwoHosts,
) -> None:
    async with attached(fleet_engine([server]), 1) as engine:
        cluster = Cluster(
            mode="servers",
            specs=tuple(engine.weight_specs()),
            sinks=[FleetSink(engine)],
            backend="servers",
            bucket_bytes=1 << 16,
            timeout_s=30,
        )
        await cluster.form_group()
        for version in range(5):
            for name, tensor in weights(version).items():
                cluster.weights[name].copy_(tensor)
            digest = await cluster.send(version)
            await cluster.receivers[0].adopt(version, digest)
            await until(lambda: len(engine.backend.fleet.serving) == 1, poll_s=0.01)
            (serving,) = engine.backend.fleet.serving
            assert (serving.version, serving.digest) == (version, digest)
            await _assert_serves(engine, version)
        for member in cluster.members:
            await member.abort(1, "the test has ended")


async def test_responses_cross_updates_of_both_hosts_with_exact_versions(server: TwoHosts) -> None:
    async with attached(fleet_engine([server]), 1) as engine:
        await adopt(engine, 0)
        tasks = begun(engine, [PROMPT[: 5 + seed] for seed in range(4)], max_tokens=480)
        for version in range(1, 4):
            await until(made(engine, 8))
            await adopt(engine, version)
        await engine.abort({"r0"})
        results = [await task for task in tasks]
    for seed, result in enumerate(results):
        assert_agrees(result, PROMPT[: 5 + seed])
    assert sum(len(result.version_runs) > 1 for result in results) >= 3


async def test_a_server_whose_further_host_died_is_lost_and_serves_again_after_its_restart(
    server: TwoHosts,
) -> None:
    events: list[str] = []
    changes = {"report": lambda kind, message: events.append(kind)}
    async with attached(fleet_engine([server], **changes), 1) as engine:
        await adopt(engine, 0)
        await _assert_serves(engine, 0)
        server.kill_further_host()
        (task,) = begun(engine, [PROMPT[:9]], max_tokens=12)
        await until(lambda: "EngineServerLost" in events, poll_s=0.05)
        assert not task.done()
        server.kill()
        server.start()
        await asyncio.to_thread(server.wait)
        await adopt(engine, 1)
        result = await task
        assert_equal(
            result.logprobs,
            expected_logprobs(result.version_runs[0][0], PROMPT[:9], result.token_ids),
        )
        await _assert_serves(engine, 1)


async def test_a_server_whose_further_host_freezes_is_lost_and_serves_again_by_itself(
    server: TwoHosts,
) -> None:
    events: list[str] = []
    changes = {"report": lambda kind, message: events.append(kind)}
    async with attached(fleet_engine([server], **changes), 1) as engine:
        await adopt(engine, 0)
        await _assert_serves(engine, 0)
        with server.frozen_further_host():
            await adopt(engine, 1)  # its bytes do not arrive in time
            assert events == ["EngineServerLost"]
            (task,) = begun(engine, [PROMPT[:9]], max_tokens=12)
        result = await task
        assert (result.version_runs, events[-1]) == (((1, 12),), "EngineServerServes")
        await _assert_serves(engine, 1)


async def test_adapters_reach_the_workers_of_both_hosts(server: TwoHosts, tmp_path: Path) -> None:
    server.kill()  # its memory and its processors are needed
    base = make_model(0)
    base.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(0)
    sent = {FROZEN_DIGEST: frozen_digest(base.named_parameters())}
    for name, value in base.named_parameters():
        owner = name.removesuffix(".weight")
        if owner.endswith(("q_proj", "o_proj", "gate_proj", "down_proj")):
            out, size = value.shape
            down = sent[owner + LORA_DOWN] = 0.3 * torch.randn(4, size, generator=generator)
            up = sent[owner + LORA_UP] = 0.3 * torch.randn(out, 4, generator=generator)
            value.data += up @ down
    options = ("--enable-lora", "--max-loras", "3", "--max-lora-rank", "8")
    with local_servers(TwoHosts, tmp_path, 1, *_OPTIONS, *_CACHE, *options) as (shared,):
        run_engine = fleet_engine([shared], adds_adapters=True, worker="run/rollout-0")
        async with attached(run_engine, 1) as engine:
            await engine.adopt_weights(3, sent)
            (result,) = await asyncio.gather(*begun(engine, [PROMPT[:7]], max_tokens=12))
    assert result.version_runs == ((3, 12),)
    with torch.no_grad():
        logits = base(torch.tensor([[*PROMPT[:7], *result.token_ids]])).logits[0, 6:-1]
    tokens = torch.tensor(result.token_ids)[:, None]
    assert_equal(result.logprobs, logits.float().log_softmax(-1).gather(1, tokens)[:, 0])
