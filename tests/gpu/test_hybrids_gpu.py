"""Hybrids on a GPU: packs equal single sequences with the installed kernels, and logprobs equal vLLM's."""

import asyncio
import importlib.util
import random
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from services.common.models.families import FAMILIES, is_mixture
from services.common.models.loading import build_model, stored_tensors
from services.rollout.engines.base import GenerationRequest
from services.rollout.engines.build import make_engine
from services.rollout.engines.engine_config import EngineConfig
from services.trainer.batch.packing import pack
from services.trainer.model.policy import Policy
from services.wire.data.jagged import Jagged
from tests.helpers.engines import running
from tests.helpers.mixtures import tiny_config
from tests.helpers.tries import random_trie

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
_HYBRIDS = [name for name, family in FAMILIES.items() if family.recurrent is not None]
_CUDA = torch.device("cuda")


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("family", _HYBRIDS)
def test_packed_logprobs_and_gradients_are_those_of_single_sequences(
    family: str, shares: bool
) -> None:
    config = tiny_config(
        family,
        hidden_size=64,
        head_dim=32,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_hidden_layers=4,
        initializer_range=0.02,
        max_position_embeddings=512,
    )
    reference, model = (
        # A copy, because a policy changes its model's configuration.
        build_model(deepcopy(config), dtype=torch.bfloat16, device="cuda", seed=0)
        for _ in range(2)
    )
    policy = Policy(model, temperature=1.0)
    # In bfloat16, rounding can change the experts that a token chooses.
    bounds = (2e-2, 0.2) if is_mixture(config.to_dict()) else (5e-3, 5e-2)
    differences = []
    for seed in range(4):
        rows = random_trie(random.Random(seed), vocabulary=61, most_samples=6, longest=80)
        samples = zip(*(row.unbind() for row in rows), strict=True)
        expected = torch.cat([_own(reference, *sample) for sample in samples])
        factors = torch.randn(len(expected), generator=torch.Generator().manual_seed(seed)).cuda()
        expected_gradient = _gradient(expected @ factors, list(reference.parameters()))
        actual, _ = policy(pack(*rows, device=_CUDA, shares_prefixes=shares))
        differences.append((actual - expected).detach().abs())
        gradient = _gradient(actual @ factors, list(model.parameters()))
        assert (gradient - expected_gradient).norm() <= bounds[1] * expected_gradient.norm()
    # The mean is over all packs, because a pack may have only two tokens.
    assert torch.cat(differences).mean() <= bounds[0]


def _own(model: torch.nn.Module, prompt: Tensor, response: Tensor) -> Tensor:
    ids = torch.cat([prompt, response])[None].cuda()
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(1, response[:, None].cuda()).squeeze(1)


def _gradient(total: Tensor, weights: list[torch.nn.Parameter]) -> Tensor:
    gradients = torch.autograd.grad(total, weights, materialize_grads=True)
    return torch.cat([gradient.flatten().float() for gradient in gradients])


@torch.no_grad()
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here")
def test_logprobs_of_vllm_are_those_of_the_trainer_after_every_adoption() -> None:
    asyncio.run(_compare_logprobs())


async def _compare_logprobs() -> None:
    config = tiny_config(
        "qwen3_5_text",
        hidden_size=256,
        head_dim=64,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_hidden_layers=4,
        initializer_range=0.02,
        max_position_embeddings=512,
        architectures=["Qwen3_5ForCausalLM"],
    )
    arguments: dict[str, Any] = {"gpu_memory_utilization": 0.3, "enforce_eager": True}
    if importlib.util.find_spec("flashinfer") is None:
        arguments["gdn_prefill_backend"] = "triton"
    engine_config = EngineConfig(
        config=config, dtype=torch.bfloat16, device=_CUDA, max_running=8, arguments=arguments
    )
    engine = make_engine("vllm", engine_config)
    prompt = [3 + (7 * number) % 50 for number in range(100)]
    scores: list[Any] = []
    async with asyncio.timeout(500), running(engine):
        await engine.wait_ready()
        for version, seed in enumerate((0, 1, 2, 3, 1)):
            model = build_model(config, dtype=torch.bfloat16, device="cuda", seed=seed)
            weights = {name: value.clone() for name, value in stored_tensors(model).items()}
            await engine.adopt_weights(version, weights)
            result = await engine.generate(
                GenerationRequest(
                    request_id=str(version), context_ids=tuple(prompt), max_tokens=200, seed=seed
                )
            )
            scores.append(await engine.score(prompt))
            rows = (torch.tensor(prompt), torch.tensor(result.token_ids))
            packed = pack(*(Jagged.from_list([row]) for row in rows), device=_CUDA)
            expected, _ = Policy(model, temperature=1.0)(packed)
            assert (torch.tensor(result.logprobs) - expected.cpu()).abs().mean() <= 5e-3
    # The same weights give the same scores bit for bit, although others were served in between.
    assert scores[4] == scores[1]
    assert scores[1] != scores[0]
