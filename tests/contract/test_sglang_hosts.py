"""An SGLang server on the CPU over two hosts, each with one of its two tensor-parallel ranks."""

from collections.abc import Iterator

import pytest
import torch

from services.extras.fleets.local import LocalSglang, local_servers
from tests.contract.checks import PROMPT, adopt, assert_agrees
from tests.contract.engines import expected_logprobs, model_config
from tests.contract.fleets import attached, fleet_engine
from tests.helpers.engines import begun, made, until
from tests.helpers.ports import free_port
from tests.helpers.two_hosts import FURTHER_ADDRESS, OverTwoHosts, require_namespaces

pytest.importorskip("sglang", reason="sglang is not installed here")
# Nightly: two ranks and their server start for minutes where processors are shared.
pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(1200),
    pytest.mark.nightly,
]


class TwoHosts(OverTwoHosts, LocalSglang):
    """A server whose second tensor-parallel rank is on another host."""

    def start(self) -> None:
        group = (
            *("--tp-size", "2", "--nnodes", "2"),
            *("--dist-init-addr", f"127.0.0.1:{free_port()}"),
        )
        address = ("--host", FURTHER_ADDRESS, "--port", str(self.port))
        self.start_ranks([*group, "--node-rank", "0"], [*address, *group, "--node-rank", "1"], {})

    @property
    def environment(self) -> dict[str, str]:
        # Otherwise SGLang wants a memory node of the machine for each rank.
        return {**super().environment, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.fixture(scope="module")
def server() -> Iterator[TwoHosts]:
    """One server, which the tests share because its start takes long."""
    require_namespaces()
    options = ("--dtype", "float32", "--max-running-requests", "8")
    with local_servers(TwoHosts, model_config(), 1, *options) as (started,):
        assert isinstance(started, TwoHosts)
        yield started


def _assert_equal(
    logprobs: tuple[float, ...], version: int, context: tuple[int, ...], tokens: tuple[int, ...]
) -> None:
    expected = expected_logprobs(version, context, tokens)
    assert float((torch.tensor(logprobs) - expected).abs().mean()) <= 1e-5


async def test_five_updates_are_exact_in_the_ranks_of_both_hosts(server: TwoHosts) -> None:
    async with attached(fleet_engine([server]), 1, timeout_s=600) as engine:
        for version in range(5):
            await adopt(engine, version)
            prompts = [PROMPT[:7], PROMPT[:11]]
            for prompt, task in zip(prompts, begun(engine, prompts, max_tokens=12), strict=True):
                result = await task
                assert result.version_runs == ((version, 12),)
                _assert_equal(result.logprobs, version, prompt, result.token_ids)
            _assert_equal(await engine.score(PROMPT), version, PROMPT[:1], PROMPT[1:])


async def test_responses_cross_updates_of_both_hosts_with_exact_versions(server: TwoHosts) -> None:
    async with attached(fleet_engine([server]), 1, timeout_s=600) as engine:
        await adopt(engine, 0)
        tasks = begun(engine, [PROMPT[: 5 + seed] for seed in range(4)], max_tokens=480)
        for version in range(1, 4):
            await until(made(engine, 8))
            await adopt(engine, version)
        results = [await task for task in tasks]
    for seed, result in enumerate(results):
        assert_agrees(result, PROMPT[: 5 + seed])
    assert all(len(result.version_runs) > 1 for result in results)
