"""The embedded engine on a GPU, where decode steps are CUDA graphs."""

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from services.rollout.engines.base import GenerationRequest, GenerationResult
from services.rollout.engines.torch.engine import TorchEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
NUM_REQUESTS = 20


def make_model(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=300,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        max_position_embeddings=1024,
    )
    with torch.device("cuda"):
        return Qwen2ForCausalLM(config).eval()


def requests(**changes: Any) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=str(seed),
            context_ids=tuple(range(3, 4 + 5 * seed)),
            max_tokens=150 - 3 * seed,
            seed=seed,
            **changes,
        )
        for seed in range(NUM_REQUESTS)
    ]


def expected(model: PreTrainedModel, context: tuple[int, ...], tokens: tuple[int, ...]) -> Tensor:
    ids = torch.tensor([context + tokens], device="cuda")
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, len(context) - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(1, ids[0, len(context) :, None]).squeeze(1).cpu()


def assert_agrees(
    request: GenerationRequest, result: GenerationResult, models: dict[int, PreTrainedModel]
) -> None:
    start = 0
    for version, count in result.version_runs:
        context = request.context_ids + result.token_ids[:start]
        tokens = result.token_ids[start : start + count]
        got = torch.tensor(result.logprobs[start : start + count])
        torch.testing.assert_close(
            got, expected(models[version], context, tokens), atol=2e-3, rtol=0
        )
        start += count
    assert start == len(result.token_ids) == request.max_tokens


async def _decode(
    engine: TorchEngine, todo: list[GenerationRequest], updates: dict[int, PreTrainedModel]
) -> list[GenerationResult]:
    async with asyncio.TaskGroup() as tasks:
        decoding = tasks.create_task(engine.run())
        await engine.pause()
        running = [tasks.create_task(engine.generate(request)) for request in todo]
        await asyncio.sleep(0.01)
        await engine.resume()
        for version, model in updates.items():
            before = engine.stats().tokens_total
            while engine.stats().tokens_total < before + 600:  # noqa: ASYNC110 -- there is no event
                await asyncio.sleep(0.001)
            await engine.adopt_weights(version, dict(model.named_parameters()))
        await asyncio.wait(running)
        decoding.cancel()
    return [task.result() for task in running]


def test_graphs_stay_right_while_requests_come_and_go_and_weights_change() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    models = {version: make_model(version) for version in (-1, 1, 2)}
    engine = TorchEngine(make_model(-1), max_running=16)
    todo = requests()
    results = asyncio.run(_decode(engine, todo, {1: models[1], 2: models[2]}))
    for request, result in zip(todo, results, strict=True):
        assert_agrees(request, result, models)
    assert {version for result in results for version, _ in result.version_runs} == {-1, 1, 2}
    assert engine._batch._step._graphs


def test_the_same_requests_give_the_same_bits() -> None:
    engine = TorchEngine(make_model(0).to(torch.bfloat16), max_running=NUM_REQUESTS)
    first, second, third = (asyncio.run(_once(engine)) for _ in range(3))
    assert second == third
    assert [result.token_ids for result in first] == [result.token_ids for result in second]


async def _once(engine: TorchEngine) -> list[GenerationResult]:
    engine._changed = asyncio.Condition()
    engine._between_steps = asyncio.Lock()
    return await _decode(engine, requests(), {})
