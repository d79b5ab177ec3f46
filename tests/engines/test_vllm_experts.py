"""Experts that vLLM reports for its tokens, also for cached prefixes and across new weights."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from services.common.models.experts import RouterWatch
from services.common.models.loading import build_model, stored_tensors
from services.rollout.engines.base import GenerationResult
from services.rollout.engines.build import make_engine
from services.rollout.engines.engine_config import EngineConfig
from services.rollout.workflows.turns import NOTHING_SAMPLED, routed_experts
from tests.helpers.engines import request, running, until
from tests.helpers.mixtures import mixture_shape

pytest.importorskip("vllm", reason="vllm is not installed here")
pytestmark = pytest.mark.timeout(600)
_ARGUMENTS = {
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 64 << 20,
    "block_size": 32,
}
_PROMPT = tuple(3 + (7 * i) % 250 for i in range(70))


def _model(seed: int) -> PreTrainedModel:
    """Returns a model with one dense layer and then experts; its choices differ strongly between seeds."""
    shape = mixture_shape("qwen3_moe") | {"moe_intermediate_size": 32}
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=256,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=3,
        mlp_only_layers=[0],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.2,
        pad_token_id=0,
        architectures=["Qwen3MoeForCausalLM"],
        **shape,
    )
    return build_model(config, dtype=torch.float32, device="cpu", seed=seed)


def _chosen(tokens: tuple[int, ...], *, seed: int) -> np.ndarray:
    """Returns the experts that a plain forward pass chooses for all tokens but the last."""
    model = _model(seed)
    watch = RouterWatch(model)
    with torch.no_grad():
        model(torch.tensor([tokens[:-1]]))
    return np.sort(watch.chosen().numpy(), 2)


def _check(result: GenerationResult, prompt: tuple[int, ...], *, first: int = 0) -> None:
    experts, tokens = result.routed_experts, prompt + result.token_ids
    assert experts is not None
    assert experts.shape == (len(tokens) - 1 - first, 2, 3)
    assert np.array_equal(np.sort(experts, 2), _chosen(tokens, seed=0)[first:])


async def test_experts_are_reported_once_per_token() -> None:
    engine_config = EngineConfig(
        config=_model(0).config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_running=8,
        arguments=_ARGUMENTS,
        returns_experts=True,
    )
    engine = make_engine("vllm", engine_config)
    async with asyncio.timeout(500), running(engine):
        await engine.adopt_weights(0, stored_tensors(_model(0)))
        _check(await engine.generate(request("first", _PROMPT)), _PROMPT)
        # A group of one prompt, and a later turn whose first experts are known.
        group = await asyncio.gather(
            *[engine.generate(request(f"g{i}", _PROMPT, seed=i, max_tokens=40)) for i in range(4)]
        )
        assert engine.stats().cached_tokens_total >= 4 * 64
        for result in group:
            _check(result, _PROMPT)
        later = (*_PROMPT, *group[0].token_ids, 7, 8, 9)
        first = len(_PROMPT) + 39
        _check(await engine.generate(request("l", later, experts_from=first)), later, first=first)

        began = engine.stats().tokens_total
        task = asyncio.ensure_future(engine.generate(request("cut", _PROMPT, max_tokens=200)))
        await until(lambda: engine.stats().tokens_total > began)
        await engine.adopt_weights(1, stored_tensors(_model(1)))
        turn = NOTHING_SAMPLED.continued(await task)
    (_, old), (_, new) = turn.version_runs
    assert old > 0 < new
    tokens = (*_PROMPT, *turn.token_ids)
    experts, num_kept = np.sort(routed_experts([turn]), 2), len(_PROMPT) + old - 1
    assert np.array_equal(experts[:num_kept], _chosen(tokens, seed=0)[:num_kept])
    assert np.array_equal(experts[num_kept:], _chosen(tokens, seed=1)[num_kept:])
