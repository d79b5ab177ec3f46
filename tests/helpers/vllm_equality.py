"""Compares the logprobs of vLLM in its batch-invariant mode with those of the trainer's policy, on one GPU.

``python -m tests.helpers.vllm_equality llama`` prints one JSON line. It is a separate process because an
environment variable, which vLLM's engine process inherits, selects the mode.
"""

import argparse
import asyncio
import json
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig

from services.rollout.engines.base import GenerationRequest, GenerationResult
from services.rollout.engines.build import make_engine
from services.rollout.engines.engine_config import EngineConfig
from tests.helpers.engines import running
from tests.helpers.equality import Subject, groups, logprobs

_SHAPES: dict[str, dict[str, Any]] = {
    # SmolLM2-135M with fewer layers.
    "llama": {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "architectures": ["LlamaForCausalLM"],
    },
    "qwen3": {
        "vocab_size": 32_000,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "architectures": ["Qwen3ForCausalLM"],
    },
}
_COMMON = {
    "num_hidden_layers": 8,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_RUNNING = 48
_PACK = 16
_TEMPERATURES = (1.0, 0.7)
_Results = dict[str, GenerationResult]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=_SHAPES)
    family = parser.parse_args().family
    shape = {"model_type": family, **_SHAPES[family], **_COMMON}
    subject = Subject(shape, device="cuda", dtype=torch.bfloat16)
    requests = groups(160, tokens=150, vocabulary=shape["vocab_size"], context=700)
    result = asyncio.run(_generated(subject, requests))
    entries: dict[str, Any] = {}
    for (temperature, number), results in result.items():
        answered = [request for request in requests if request.request_id in results]
        entries[f"temperature {temperature}, {number} at once"] = _compared(
            subject, answered, results, temperature
        )
    temperature = _TEMPERATURES[1]
    entries["with gradients"] = _with_gradients(
        subject, requests[:8], result[temperature, _RUNNING], temperature
    )
    print(json.dumps(entries))


async def _generated(
    subject: Subject, first_requests: list[GenerationRequest]
) -> dict[tuple[float, int], _Results]:
    """Samples all requests at once, then some of them one by one, at each temperature."""
    engine_config = EngineConfig(
        config=AutoConfig.for_model(**subject.config),
        dtype=subject.dtype,
        device=torch.device(subject.device),
        max_running=_RUNNING,
        is_reproducible=True,
        is_invariant=True,
        arguments={"max_model_len": 1024, "gpu_memory_utilization": 0.2},
    )
    engine = make_engine("vllm", engine_config)
    result: dict[tuple[float, int], _Results] = {}
    async with asyncio.timeout(400), running(engine):
        await engine.wait_ready()
        weights = {name: value.detach() for name, value in subject.model().named_parameters()}
        await engine.adopt_weights(0, weights)
        for temperature in _TEMPERATURES:
            requests = [replace(request, temperature=temperature) for request in first_requests]
            results = await asyncio.gather(*map(engine.generate, requests))
            names = [request.request_id for request in requests]
            result[temperature, _RUNNING] = dict(zip(names, results, strict=True))
            result[temperature, 1] = {
                request.request_id: await engine.generate(request) for request in requests[::_PACK]
            }
    return result


def _compared(
    subject: Subject, requests: list[GenerationRequest], results: _Results, temperature: float
) -> dict[str, float]:
    policy = subject.policy("vllm", temperature=temperature)
    parts = []
    for start in range(0, len(requests), _PACK):
        pack = requests[start : start + _PACK]
        packed = subject.packed(pack, results, shares_prefixes=start % (2 * _PACK) == 0)
        with torch.no_grad():
            parts.append(policy(packed)[0].cpu())
    return _difference(torch.cat(parts), logprobs(requests, results))


def _with_gradients(
    subject: Subject, requests: list[GenerationRequest], results: _Results, temperature: float
) -> dict[str, float]:
    policy = subject.policy("vllm", temperature=temperature)
    logprobs_of_policy, entropy = policy(subject.packed(requests, results, shares_prefixes=True))
    (logprobs_of_policy.sum() + entropy.sum()).backward()
    are_finite = all(bool(parameter.grad.isfinite().all()) for parameter in policy.parameters())
    return _difference(logprobs_of_policy.detach().cpu(), logprobs(requests, results)) | {
        "are_finite": are_finite
    }


def _difference(computed: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    difference = (computed - expected).abs()
    return {
        "tokens": len(computed),
        "unequal": int((computed != expected).sum()),
        "max_difference": float(difference.max()),
        "mean_difference": float(difference.mean()),
    }


if __name__ == "__main__":
    main()
