"""Weights written bucket by bucket into an engine on a GPU equal those that are copied as a whole."""

import importlib.util

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from services.extras.external_engine.engine import ExternalEngine
from services.rollout.engines.build import make_engine
from services.rollout.engines.engine_config import EngineConfig
from tests.helpers.engines import running
from tests.helpers.placing import place_all

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
ARGUMENTS = {
    "vllm": {"max_model_len": 512, "gpu_memory_utilization": 0.3, "enforce_eager": True},
    "sglang": {"context_length": 512, "mem_fraction_static": 0.3, "disable_cuda_graph": True},
}
PROMPT = tuple(3 + (7 * i) % 500 for i in range(100))


@pytest.mark.parametrize("engine_name", ["vllm", "sglang"])
async def test_weights_written_into_an_engine_are_those_that_a_copy_brings(
    engine_name: str,
) -> None:
    if importlib.util.find_spec(engine_name) is None or not torch.cuda.is_available():
        pytest.skip(f"needs {engine_name} and a GPU")
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        architectures=["Qwen2ForCausalLM"],
    )
    engine_config = EngineConfig(
        config=config,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        max_running=8,
        arguments=ARGUMENTS[engine_name],
        is_written_in_place=True,
    )
    engine = make_engine(engine_name, engine_config)
    assert isinstance(engine, ExternalEngine)
    async with running(engine):
        await engine.wait_ready()
        for version in range(3):
            torch.manual_seed(version)
            model = Qwen2ForCausalLM(config).to("cuda", torch.bfloat16)
            weights = {name: value.detach() for name, value in model.named_parameters()}
            await place_all(engine.open_weights, weights, num_sources=2, bucket_bytes=1 << 20)
            await engine.adopt_placed(version)
            await engine.resume()
            in_place = await engine.score(PROMPT)
            await engine.adopt_weights(version, weights)
            assert await engine.score(PROMPT) == in_place
            assert engine.stats().weight_version == version
