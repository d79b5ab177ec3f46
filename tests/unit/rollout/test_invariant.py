"""Tests of batch_invariant: a response has the same bits alone, in any batch, and resumed elsewhere."""

from dataclasses import replace

import pytest
import torch

from services.common.models.invariant import use_invariant_operators
from services.common.models.loading import build_model, load_config
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.loader import SpecError
from services.common.runspec.run import ModelSpec
from services.rollout.engines.base import GenerationRequest, GenerationResult
from services.rollout.engines.torch.decoding import DecodeBatch
from services.rollout.engines.torch.engine import TorchEngine
from tests.helpers.specs import spec_with

MODELS = ("tiny:qwen2-0.4m", "tiny:qwen3-0.4m", "tiny:llama-0.4m")


def batch_of(path: str, *, seed: int = 0) -> DecodeBatch:
    spec = ModelSpec(path=path, tokenizer="bytes")
    config = load_config(spec, load_tokenizer(spec))
    model = build_model(config, dtype=torch.float32, device="cpu", seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    engine = TorchEngine(model, max_running=64, is_invariant=True)
    return engine._batch


def requests(count: int) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 90, (count,), generator=generator).tolist()
    return [
        GenerationRequest(
            request_id=f"r{number}",
            context_ids=tuple(torch.randint(2, 200, (length,), generator=generator).tolist()),
            max_tokens=8 + number % 5,
            seed=number,
        )
        for number, length in enumerate(lengths)
    ]


def decoded(
    batch: DecodeBatch, generation_requests: list[GenerationRequest]
) -> dict[str, GenerationResult]:
    batch.admit(generation_requests)
    results: dict[str, GenerationResult] = {}
    while len(batch):
        results |= dict(batch.step(0))
    return results


@pytest.mark.parametrize("path", MODELS)
def test_tokens_and_logprobs_do_not_depend_on_the_batch(path: str) -> None:
    generation_requests = requests(37)
    batch = batch_of(path)
    together = decoded(batch, generation_requests)
    alone: dict[str, GenerationResult] = {}
    for request in generation_requests[:6]:
        alone |= decoded(batch, [request])
    few = decoded(batch, generation_requests[3:8])
    for other in (alone, few):
        assert {name: together[name] for name in other} == other


def test_a_resumed_response_continues_as_if_it_had_not_been_parked() -> None:
    generation_requests = requests(6)
    batch = batch_of(MODELS[0])
    whole = decoded(batch, generation_requests)
    parted = [replace(request, max_tokens=3) for request in generation_requests]
    first = decoded(batch, parted)
    rest = [
        replace(
            request,
            context_ids=request.context_ids + first[request.request_id].token_ids,
            max_tokens=request.max_tokens - 3,
            draw_offset=3,
        )
        for request in generation_requests
    ]
    second = decoded(batch_of(MODELS[0]), rest)
    for name, result in whole.items():
        assert first[name].token_ids + second[name].token_ids == result.token_ids
        assert first[name].logprobs + second[name].logprobs == result.logprobs


def test_engines_and_models_without_invariant_operators_are_refused() -> None:
    rollout = {"rewards": [{"name": "exact_match"}], "reproducible": "batch_invariant"}
    assert spec_with(rollout=rollout).rollout.reproducible == "batch_invariant"
    with pytest.raises(SpecError, match="batch_invariant"):
        spec_with(rollout={**rollout, "engine": "fake"})
    spec = ModelSpec(path="tiny:qwen3_moe-0.7m", tokenizer="bytes")
    config = load_config(spec, load_tokenizer(spec))
    with pytest.raises(ValueError, match="experts"):
        use_invariant_operators(build_model(config, dtype=torch.float32, device="cpu"))
