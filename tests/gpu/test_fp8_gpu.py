"""FP8 weights that vLLM serves on a GPU after many updates, each of which vLLM's workers verify."""

import asyncio
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig, Qwen2Config, Qwen2ForCausalLM

from services.common.models.quantization import Fp8
from services.extras.external_engine.engine import ExternalEngine
from services.rollout.engines.build import make_engine
from services.rollout.engines.engine_config import EngineConfig
from services.rollout.engines.torch.engine import TorchEngine
from tests.helpers.engines import request, running
from tests.helpers.gpu_runs import train_on_gpus, use_one_gpu
from tests.helpers.placing import place_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
]
PROMPT = tuple(3 + (7 * i) % 500 for i in range(100))


def config(*, tied: bool) -> PretrainedConfig:
    return Qwen2Config(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        architectures=["Qwen2ForCausalLM"],
    )


def weights_of(version: int, *, tied: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(version)
    model = Qwen2ForCausalLM(config(tied=tied)).to("cuda", torch.bfloat16)
    for name, value in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(value, std=0.5)
    return {name: value.detach() for name, value in model.named_parameters()}


def difference(logprobs: Sequence[float], other_logprobs: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(logprobs, other_logprobs, strict=True)) / len(logprobs)


@pytest.mark.parametrize(
    ("kind", "cache", "is_eager", "tied"),
    [
        ("fp8", None, False, True),
        ("fp8_block", None, False, False),
        ("fp8", "fp8", True, False),
        (None, "fp8", True, True),
    ],
    ids=["fp8, graphs", "blocks, graphs", "fp8 and cache", "cache"],
)
def test_vllm_serves_fp8_after_five_updates_and_verifies_each(
    kind: Fp8 | None, cache: str | None, is_eager: bool, tied: bool
) -> None:
    asyncio.run(check_updates(kind, cache, is_eager=is_eager, tied=tied))


async def check_updates(kind: Fp8 | None, cache: str | None, *, is_eager: bool, tied: bool) -> None:
    engine_config = EngineConfig(
        config=config(tied=tied),
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        max_running=8,
        quantization=kind,
        kv_cache_dtype=cache,
        is_written_in_place=True,
        arguments={
            "max_model_len": 512,
            "gpu_memory_utilization": 0.2,
            "enforce_eager": is_eager,
        },
    )
    engine = make_engine("vllm", engine_config)
    assert isinstance(engine, ExternalEngine)
    outcomes: list[Any] = []
    async with running(engine):
        await engine.wait_ready()
        llm = engine.backend.llm  # type: ignore[attr-defined]
        call = llm.collective_rpc

        async def recorded(*arguments: Any, **options: Any) -> Any:
            outcomes.extend(outcome := await call(*arguments, **options))
            return outcome

        llm.collective_rpc = recorded
        for version in range(5):
            weights = weights_of(version, tied=tied)
            await engine.adopt_weights(version, weights)
            if kind is not None:
                assert outcomes[-1] == {"way": "verified", "differing": []}
            served = await engine.score(PROMPT)
            rounded, plain = [
                TorchEngine(
                    Qwen2ForCausalLM(config(tied=tied)).to("cuda", torch.bfloat16),
                    max_running=2,
                    quantization=outcome,
                )
                for outcome in (kind, None)
            ]
            for outcome in (rounded, plain):
                await outcome.adopt_weights(version, weights)
            rounded_logprobs, plain_logprobs = (
                await rounded.score(PROMPT),
                await plain.score(PROMPT),
            )
            print(
                kind,
                cache,
                version,
                difference(served, rounded_logprobs),
                difference(served, plain_logprobs),
            )
            # Logprobs of other weights differ by whole units.
            assert difference(served, rounded_logprobs) < 0.1
            result = await engine.generate(request(f"r{version}", PROMPT, max_tokens=32))
            assert [run[0] for run in result.version_runs] == [version]
            again = await engine.score((*PROMPT, *result.token_ids))
            assert difference(again[len(PROMPT) - 1 :], result.logprobs) < 0.15
            await place_all(engine.open_weights, weights, num_sources=2, bucket_bytes=1 << 20)
            await engine.adopt_placed(version)
            await engine.resume()
            assert await engine.score(PROMPT) == served
    assert all(outcome["differing"] == [] for outcome in outcomes)


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "adapters"])
def test_a_run_with_fp8_rollouts_trains_on_one_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool
) -> None:
    use_one_gpu(monkeypatch)
    settings = (
        "rollout.quantization=fp8",
        "trainer.steps=6",
        *(("trainer.lora={rank: 8, alpha: 16}",) if lora else ()),
    )
    finished = train_on_gpus(tmp_path, "vllm", *settings, timeout=800)
    assert finished.summary["state"] == "SUCCEEDED"
    (metrics,) = (tmp_path / "runs").glob("*/metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    print([(step["kl_rollout"], step["ess"]) for step in steps])
    assert all(0 < step["kl_rollout"] < 0.1 for step in steps)
