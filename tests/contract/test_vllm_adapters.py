"""Runs with adapters that share one of vLLM's servers on the CPU."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.extras.fleets.engine import FleetEngine
from services.extras.fleets.local import LocalServer, LocalVllm, local_servers
from services.rollout.engines.base import EngineDiedError, GenerationResult
from services.weightsync.adapters import FROZEN_DIGEST, frozen_digest, merged_weight
from services.weightsync.weight_plan import LORA_DOWN, LORA_UP
from tests.contract.checks import PROMPT
from tests.contract.engines import make_model
from tests.contract.fleets import fleet_engine
from tests.helpers.engines import begun, made, running, until

pytest.importorskip("vllm", reason="vllm is not installed here")
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

_BASE, _RANK = 0, 4
_MODULES = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model's folder."""
    path = tmp_path_factory.mktemp("base")
    make_model(_BASE).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LocalServer]:
    """One server, which all tests share because its start takes long."""
    options = ("--dtype", "float32", "--max-model-len", "512", "--max-num-batched-tokens", "512")
    cache = ("--kv-cache-memory-bytes", str(64 << 20), "--max-num-seqs", "8")
    adapters = ("--enable-lora", "--max-loras", "3", "--max-lora-rank", "8")
    with local_servers(LocalVllm, folder, 1, *options, *cache, *adapters) as (started,):
        yield started


def _adapters(seed: int) -> dict[str, Tensor]:
    """Returns adapters that change the model strongly."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, value in make_model(_BASE).named_parameters():
        owner = name.removesuffix(".weight")
        if owner.endswith(_MODULES):
            out, size = value.shape
            tensors[owner + LORA_DOWN] = 0.3 * torch.randn(_RANK, size, generator=generator)
            tensors[owner + LORA_UP] = 0.3 * torch.randn(out, _RANK, generator=generator)
    return tensors


def _sent(seed: int, *, base: int = _BASE) -> dict[str, Tensor]:
    """Returns what a trainer sends."""
    digest = frozen_digest(make_model(base).named_parameters())
    return {**_adapters(seed), FROZEN_DIGEST: digest}


def _merged(seed: int) -> PreTrainedModel:
    model, adapters = make_model(_BASE), _adapters(seed)
    parameters = dict(model.named_parameters())
    for name, down in adapters.items():
        if name.endswith(LORA_DOWN):
            owner = name.removesuffix(LORA_DOWN)
            weight = parameters[f"{owner}.weight"]
            weight.data = merged_weight(weight.data, down, adapters[owner + LORA_UP])
    return model


def _expected(seed: int, context: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Returns the logprobs ``[N]`` of tokens after a context under merged adapters."""
    with torch.no_grad():
        logits = _merged(seed)(torch.tensor([[*context, *tokens]])).logits[0]
    logprobs = torch.log_softmax(logits[len(context) - 1 : -1].float(), -1)
    return logprobs.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)


def _assert_exact(
    result: GenerationResult, context: Sequence[int], seeds: Mapping[int, int]
) -> None:
    """Compares each token with the adapter of the version that it states."""
    start = 0
    for version, number in result.version_runs:
        tokens = result.token_ids[start : start + number]
        before = (*context, *result.token_ids[:start])
        logprobs = torch.tensor(result.logprobs[start : start + number])
        difference = (logprobs - _expected(seeds[version], before, tokens)).abs()
        assert float(difference.mean()) <= 1e-5
        assert float(difference.max()) <= 1e-4
        start += number
    assert start == len(result.token_ids)


def _engine(server: LocalServer, run: str, **changes: Any) -> FleetEngine:
    return fleet_engine(
        [server], **{"adds_adapters": True, "worker": f"{run}/rollout-0", **changes}
    )


@asynccontextmanager
async def _attached(
    server: LocalServer, run: str, seed: int, **changes: Any
) -> AsyncIterator[FleetEngine]:
    """Yields the engine of a run that serves its version 0."""
    engine = _engine(server, run, **changes)
    async with running(engine), asyncio.timeout(300):
        await engine.wait_ready()
        await engine.adopt_weights(0, _sent(seed))
        yield engine


async def test_two_runs_sample_exactly_under_their_own_adapters(server: LocalServer) -> None:
    async with _attached(server, "a", 1) as first, _attached(server, "b", 2) as second:
        tasks = [
            (engine, seed, begun(engine, [PROMPT[:7], PROMPT[:11], PROMPT[:13]], max_tokens=16))
            for engine, seed in ((first, 1), (second, 2))
        ]
        for engine, seed, begun_tasks in tasks:
            for context, task in zip((7, 11, 13), begun_tasks, strict=True):
                result = await task
                assert result.version_runs == ((0, 16),)
                _assert_exact(result, PROMPT[:context], {0: seed})
            difference = torch.tensor(await engine.score(PROMPT)) - _expected(
                seed, PROMPT[:1], PROMPT[1:]
            )
            assert float(difference.abs().mean()) <= 1e-5


async def test_an_adapter_is_replaced_while_another_run_generates(server: LocalServer) -> None:
    async with _attached(server, "a", 1) as first, _attached(server, "b", 2) as second:
        steady = begun(second, [PROMPT[: 5 + n] for n in range(4)], max_tokens=400)
        changing = begun(first, [PROMPT[: 9 + n] for n in range(4)], max_tokens=400)
        for version in range(1, 4):
            await until(made(first, 12))
            await first.adopt_weights(version, _sent(10 + version))
        results = [await task for task in changing]
        versions = {0: 1, **{version: 10 + version for version in range(1, 4)}}
        for number, result in enumerate(results):
            _assert_exact(result, PROMPT[: 9 + number], versions)
        assert any(len(result.version_runs) > 1 for result in results)
        for number, task in enumerate(steady):
            result = await task
            assert result.version_runs == ((0, 400),)
            _assert_exact(result, PROMPT[: 5 + number], {0: 2})


async def test_a_run_that_ends_leaves_the_others_and_no_adapter(server: LocalServer) -> None:
    async with _attached(server, "a", 1) as first:
        async with _attached(server, "b", 2) as second:
            tasks = begun(first, [PROMPT[:9]], max_tokens=300)
            begun(second, [PROMPT[:9]], max_tokens=300)
            await until(made(first, 20))
        (result,) = [await task for task in tasks]
        _assert_exact(result, PROMPT[:9], {0: 1})
        async with _attached(server, "c", 3) as third, _attached(server, "d", 4) as fourth:
            for engine, seed in ((third, 3), (fourth, 4)):
                (task,) = begun(engine, [PROMPT[:9]], max_tokens=8)
                _assert_exact(await task, PROMPT[:9], {0: seed})


async def test_a_run_on_another_base_gets_no_work(server: LocalServer) -> None:
    reports: list[str] = []
    engine = _engine(server, "a", report=lambda kind, message: reports.append(f"{kind}: {message}"))
    async with running(engine), asyncio.timeout(120):
        await engine.wait_ready()
        await engine.adopt_weights(0, _sent(1, base=7))
        await until(lambda: bool(reports), poll_s=0.01)
        assert "base weights have digest" in reports[0]
        assert not engine.backend.fleet.serving


async def test_a_run_with_whole_weights_is_refused_by_the_owners_name(server: LocalServer) -> None:
    async with _attached(server, "a", 1):
        whole = _engine(server, "w", adds_adapters=False)
        with pytest.raises(EngineDiedError, match="a/rollout-0 use this server with adapters"):
            await whole.run()
