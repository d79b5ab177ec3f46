"""The torch engine with a random model of real size: tokens/s, adoption time, exactness after updates.

Usage: python -m bench.rollout.real_size [--size 0.5b|3b] [--device cuda] [--dtype bfloat16] [--out FILE.json]

Exactness: after several adoptions of different weights, one of them during generation, the engine
must produce the same tokens and logprobs, bit for bit, as a new engine that was loaded with the
last weights. Logprobs are also compared with a plain forward pass, as the trainer computes it.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, Qwen2Config

from bench.report import report_to
from services.common.models.loading import build_model
from services.rollout.engines.base import GenerationRequest, GenerationResult
from services.rollout.engines.torch.engine import TorchEngine

SHAPES = {
    "tiny": (128, 336, 2, 4, 2, 512),
    "0.5b": (896, 4864, 24, 14, 2, 151_936),
    "3b": (2048, 11_008, 36, 16, 2, 151_936),
}


def build(arguments: argparse.Namespace, seed: int) -> PreTrainedModel:
    """Returns a random model in the shape of Qwen2.5."""
    hidden, intermediate, layers, heads, kv_heads, vocab = SHAPES[arguments.size]
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        dtype=arguments.dtype,
    )
    return build_model(
        config, dtype=getattr(torch, arguments.dtype), device=arguments.device, seed=seed
    )


def requests(count: int, num_tokens: int, vocab: int) -> list[GenerationRequest]:
    """Returns requests with prompts of 100 tokens, in groups of eight."""
    return [
        GenerationRequest(
            request_id=f"r{index}",
            context_ids=tuple((37 * (index // 8) + 11 * place) % vocab for place in range(100)),
            max_tokens=num_tokens,
            seed=index,
        )
        for index in range(count)
    ]


async def generate(engine: TorchEngine, todo: list[GenerationRequest]) -> list[GenerationResult]:
    """Returns results of requests that are all admitted at once, so that every run has the same batches."""
    await engine.pause()
    tasks = [asyncio.ensure_future(engine.generate(request)) for request in todo]
    await asyncio.sleep(0.01)
    await engine.resume()
    return await asyncio.gather(*tasks)


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures one size."""
    model = build(arguments, 0)
    vocab = model.config.vocab_size
    report: dict[str, Any] = {
        "size": arguments.size,
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "dtype": arguments.dtype,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "weight_gb": round(sum(p.nbytes for p in model.parameters()) / 1e9, 2),
    }
    engine = TorchEngine(model, max_running=256)
    async with asyncio.TaskGroup() as tasks:
        decoding = [tasks.create_task(engine.run())]
        for count in (1, 32, 256):
            todo = requests(count, 64, vocab)
            await generate(engine, todo)
            started_at = time.perf_counter()
            await generate(engine, todo)
            seconds = time.perf_counter() - started_at
            report[f"tokens_per_s_{count}"] = round(count * 64 / seconds)
        stalls = []
        sources = [build(arguments, seed) for seed in (1, 2)]
        for version in range(1, 6):
            tensors = dict(sources[version % 2].named_parameters())
            running = asyncio.ensure_future(generate(engine, requests(8, 64, vocab)))
            await asyncio.sleep(0.05)
            stalls.append(await engine.adopt_weights(version, tensors))
            mixed = await running
        report["adopt_ms_median"] = round(1e3 * statistics.median(stalls), 1)
        report["versions_in_last_update"] = sorted({v for r in mixed for v, _ in r.version_runs})
        last = build(arguments, 2)
        report["parameters_equal_bit_for_bit"] = all(
            torch.equal(live, loaded)
            for live, loaded in zip(model.parameters(), last.parameters(), strict=True)
        )
        fresh = TorchEngine(last, max_running=256)
        decoding.append(tasks.create_task(fresh.run()))
        todo = requests(32, 64, vocab)
        updated, loaded = await generate(engine, todo), await generate(fresh, todo)
        again = await generate(engine, todo)
        scores = [await engine.score(todo[0].context_ids) for _ in range(2)]
        decoding._CAPTURE_AFTER = sys.maxsize  # noqa: SLF001 -- no more graphs
        plain = TorchEngine(last, max_running=256)
        decoding.append(tasks.create_task(plain.run()))
        without_graphs = [await generate(plain, todo) for _ in range(2)]
        for task in decoding:
            task.cancel()
    report["scores_equal_again"] = scores[0] == scores[1]
    for name, one, other in (
        ("loaded", updated, loaded),
        ("itself", updated, again),
        ("itself_without_graphs", *without_graphs),
        ("graphs_without_graphs", loaded, without_graphs[0]),
    ):
        pairs = list(zip(one, other, strict=True))
        report[f"tokens_equal_to_{name}"] = sum(a.token_ids == b.token_ids for a, b in pairs)
        report[f"bits_equal_to_{name}"] = sum(a.logprobs == b.logprobs for a, b in pairs)
        report[f"first_difference_to_{name}"] = min(
            first_difference(a.logprobs, b.logprobs) for a, b in pairs
        )
    report |= compare_with_forward(sources[1], todo, updated)
    return report


def first_difference(one: Sequence[float], other: Sequence[float]) -> int:
    """Returns the index of the first values that differ; the length if none do."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((place for place, (a, b) in pairs if a != b), len(one))


@torch.inference_mode()
def compare_with_forward(
    model: PreTrainedModel, todo: list[GenerationRequest], results: list[GenerationResult]
) -> dict[str, Any]:
    """Compares the results with a plain forward pass over whole sequences."""
    distances: list[float] = []
    for request, result in zip(todo, results, strict=True):
        ids = torch.tensor([request.context_ids + result.token_ids], device=model.device)
        logits = model(ids).logits[0, len(request.context_ids) - 1 : -1].float()
        tokens = torch.tensor(result.token_ids, device=model.device)[:, None]
        expected = torch.log_softmax(logits, dim=-1).gather(1, tokens).squeeze(1)
        got = torch.tensor(result.logprobs, device=model.device)
        distances += (got - expected).abs().tolist()
    distances.sort()
    return {
        "logprob_distance_mean": statistics.fmean(distances),
        "logprob_distance_p999": distances[int(0.999 * len(distances))],
        "logprob_distance_max": distances[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sorted(SHAPES), default="0.5b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    report_to(arguments.out, asyncio.run(measure(arguments)))


if __name__ == "__main__":
    main()
