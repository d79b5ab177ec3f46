"""Two tensor-parallel vLLM workers, each of which writes its own parts of the received weights."""

import asyncio

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from services.extras.external_engine.engine import ExternalEngine
from services.rollout.engines.build import make_engine
from services.rollout.engines.engine_config import EngineConfig
from tests.helpers.engines import running
from tests.helpers.placing import place_all

pytest.importorskip("vllm", reason="vllm is not installed here")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]
PROMPT = tuple(3 + (7 * i) % 250 for i in range(60))
ARGUMENTS = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 64 << 20,
}


async def test_weights_in_place_are_those_of_the_trainer_on_two_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        architectures=["Qwen2ForCausalLM"],
    )
    engine_config = EngineConfig(
        config=config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_running=4,
        arguments=ARGUMENTS,
        is_written_in_place=True,
    )
    engine = make_engine("vllm", engine_config)
    assert isinstance(engine, ExternalEngine)
    async with running(engine), asyncio.timeout(500):
        for version in range(3):
            torch.manual_seed(version)
            model = Qwen2ForCausalLM(config).eval()
            weights = {name: value.detach() for name, value in model.named_parameters()}
            await place_all(engine.open_weights, weights, num_sources=3)
            await engine.adopt_placed(version)
            await engine.resume()
            in_place = await engine.score(PROMPT)
            await engine.adopt_weights(version, weights)
            assert await engine.score(PROMPT) == in_place
            ids = torch.tensor([PROMPT])
            with torch.no_grad():
                logprobs = torch.log_softmax(model(ids).logits[0, :-1], -1)
            expected = logprobs.gather(1, ids[0, 1:, None]).squeeze(1)
            torch.testing.assert_close(torch.tensor(in_place), expected, atol=1e-4, rtol=0)
