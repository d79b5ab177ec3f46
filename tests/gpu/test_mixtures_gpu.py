"""Mixtures of experts on a GPU: grouped products, and experts that an engine reports with CUDA graphs."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from services.common.models.loading import build_model
from services.rollout.engines.base import GenerationRequest
from services.rollout.engines.torch.engine import TorchEngine
from services.trainer.batch.packing import pack
from services.trainer.model.policy import Policy
from services.wire.data.jagged import Jagged
from tests.helpers.mixtures import mixture_shape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
_FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss")


def _model(family: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    shape = {
        "vocab_size": 300,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "initializer_range": 0.1,
        "max_position_embeddings": 1024,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(family, **{**shape, **mixture_shape(family)})
    model = build_model(config, dtype=torch.float32, device="cpu", seed=1)
    return model.to(device=device, dtype=dtype)


@pytest.mark.parametrize("family", _FAMILIES)
def test_grouped_products_are_those_of_the_loop(family: str) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts, responses = (
        Jagged.from_list([torch.randint(3, 300, (n,), generator=generator) for n in sizes])
        for sizes in ((30, 5), (200, 90))
    )
    results = {}
    ways = (("cpu", torch.float32), ("cpu", torch.bfloat16), ("cuda", torch.bfloat16))
    for device, dtype in ways:
        policy = Policy(_model(family, device, dtype), temperature=1.0)
        logprobs, _ = policy(pack(prompts, responses, device=torch.device(device)))
        logprobs.sum().backward()
        gradient = policy.model.model.layers[1].mlp.experts.down_proj.grad
        results[device, dtype] = logprobs.detach().float().cpu(), gradient.float().cpu()
    exact, loop, grouped = (results[way] for way in ways)
    # In half precision some tokens choose other experts; the loop over experts shows the effect.
    assert (grouped[0] - exact[0]).abs().mean() < 1.5 * (loop[0] - exact[0]).abs().mean()
    assert (grouped[1] - exact[1]).norm() < 2.5 * (loop[1] - exact[1]).norm()


@pytest.mark.parametrize("family", _FAMILIES)
async def test_an_engine_reports_the_experts_of_every_token_with_cuda_graphs(family: str) -> None:
    engine = TorchEngine(
        _model(family, "cuda", torch.bfloat16), max_running=8, returns_experts=True
    )
    serving = asyncio.ensure_future(engine.run())
    requests = [
        GenerationRequest(request_id=str(n), context_ids=(3,) * (n + 1), max_tokens=40, seed=n)
        for n in range(8)
    ]
    results = await asyncio.gather(*[engine.generate(request) for request in requests])
    serving.cancel()
    for request, result in zip(requests, results, strict=True):
        reported = result.routed_experts
        assert reported is not None
        assert len(reported) == len(request.context_ids) + len(result.token_ids) - 1
        assert reported.max() < 8
        assert all(len(set(chosen)) == 3 for chosen in np.reshape(reported, (-1, 3)).tolist())
