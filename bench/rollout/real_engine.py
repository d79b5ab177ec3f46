r"""Tests an engine with a trained model: weight updates, and agreement with the trainer.

Usage: VENV/bin/python -m bench.rollout.real_engine ENGINE [--size tiny|1.5b] --folder F [--out FILE]

On a CPU, in the environment of ``make test-vllm`` or ``make test-sglang``, with
``OMP_NUM_THREADS=1``::

    python -m bench.rollout.real_engine vllm --folder F --out bench/results/rollout-vllm-cpu.json

On one GPU, in bf16, where the engines' CUDA builds are installed, run in this order; the second
command finds the trained model in the folder. The settings suit builds whose only kernels are
FlashAttention and Triton. The first command takes about four minutes, one of them for training::

    python -m bench.rollout.real_engine vllm --size 1.5b --steps 300 --folder F \
        --arguments '{"enforce_eager": true, "gpu_memory_utilization": 0.4}' \
        --out bench/results/rollout-vllm-h200.json
    python -m bench.rollout.real_engine sglang --size 1.5b --folder F \
        --arguments '{"attention_backend": "triton", "disable_cuda_graph": true,
            "mem_fraction_static": 0.4}' \
        --out bench/results/rollout-sglang-h200.json
    python -m bench.rollout.real_engine torch --size 1.5b --folder F \
        --out bench/results/rollout-torch-h200.json
    python -m bench.rollout.real_size --size 0.5b --out bench/results/rollout-torch-gpu-0.5b.json

Bars: ``loaded`` equals ``fingerprints``, as does ``itself`` if a cached prefix changes no rounding
(with SGLang's Triton attention it does); ``distance_mean`` <= 5e-3 and ``distance_p999`` <= 0.1
(fp32: ``distance_max`` <= 1e-4).

A random model is first trained briefly, so that its logprobs resemble those of a real model, and
saved in the folder. The engine starts with other weights, receives several versions during
generation, the saved one last, and must then produce the same logprobs, bit for bit, as a new
engine that loaded the folder.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config

from bench.report import GrowingReport
from bench.rollout.driven import opened, order, requests, serving
from services.common.models.loading import build_model, load_folder
from services.rollout.engines.base import Engine, GenerationRequest, GenerationResult
from services.rollout.engines.torch.engine import TorchEngine
from services.trainer.batch.packing import pack
from services.trainer.model.policy import Policy
from services.wire.data.jagged import Jagged

SHAPES = {
    "tiny": (128, 336, 2, 4, 4, 512),
    "0.5b": (896, 4864, 24, 14, 2, 151_936),
    "1.5b": (1536, 8960, 28, 12, 2, 151_936),
}
NUM_SYMBOLS = 400
_MAX_RUNNING = 64


def make_config(size: str) -> Qwen2Config:
    """Returns a model configuration in the shape of Qwen2.5."""
    hidden, intermediate, layers, heads, kv_heads, vocab = SHAPES[size]
    return Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        architectures=["Qwen2ForCausalLM"],
    )


def train(size: str, dtype: torch.dtype, device: str, steps: int) -> tuple[PreTrainedModel, float]:
    """Returns a model that learned to count, with one random token in five, and its last loss."""
    torch.manual_seed(0)
    model = build_model(make_config(size), dtype=dtype, device=device)
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
    loss = torch.zeros(())
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-4 * min(1, (step + 1) / 20)
        start = torch.randint(NUM_SYMBOLS, (16, 1), device=device)
        ids = (start + torch.arange(256, device=device)) % NUM_SYMBOLS
        noise = torch.rand(ids.shape, device=device) < 0.2
        ids = torch.where(noise, torch.randint(NUM_SYMBOLS, ids.shape, device=device), ids)
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.gradient_checkpointing_disable()
    return model.eval().requires_grad_(False), float(loss.detach())


async def updates(engine: Engine, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Adopts perturbed versions and then the weights themselves, each while requests run."""
    stalls, versions = [], set[int]()
    generator = torch.Generator(next(iter(weights.values())).device).manual_seed(1)
    for version in range(1, 6):
        tensors = weights
        if version < 5:
            tensors = {
                name: value
                + 0.02
                * value.float().std()
                * torch.randn(
                    value.shape, generator=generator, device=value.device, dtype=value.dtype
                )
                for name, value in weights.items()
            }
        todo = requests(f"u{version}", 8, 100, NUM_SYMBOLS)
        running = [asyncio.ensure_future(engine.generate(request)) for request in todo]
        before = engine.stats().tokens_total
        while engine.stats().tokens_total < before + 200:
            await asyncio.sleep(0.005)
        stalls.append(await engine.adopt_weights(version, tensors))
        results = await asyncio.gather(*running)
        versions |= {version for result in results for version, _ in result.version_runs}
    return {
        "stall_ms_first": round(1e3 * stalls[0], 1),
        "stall_ms_median": round(1e3 * statistics.median(stalls[1:]), 1),
        "versions_seen": sorted(versions),
    }


async def fingerprint(engine: Engine) -> dict[str, Any]:
    """Returns an engine's results for fixed texts, one after the other.

    No other request uses these texts, which are reversed: a prefix that the cache already holds was
    computed in another batch, with other rounding.
    """
    texts = [request.context_ids for request in requests("f", 8, 1, NUM_SYMBOLS)]
    scores = [await engine.score(text) for text in texts]
    greedy = [
        await engine.generate(replace(request, context_ids=request.context_ids[::-1]))
        for request in requests("g", 8, 24, NUM_SYMBOLS, temperature=0.0)
    ]
    return {"scores": scores, "greedy": [(r.token_ids, r.logprobs) for r in greedy]}


def distances(
    model: PreTrainedModel, todo: list[GenerationRequest], results: list[GenerationResult]
) -> dict[str, float]:
    """Returns the distances of the engine's logprobs from the trainer's."""
    packed = pack(
        Jagged.from_list([torch.tensor(request.context_ids) for request in todo]),
        Jagged.from_list([torch.tensor(result.token_ids) for result in results]),
        device=model.device,
    )
    with torch.no_grad():
        expected, entropies = Policy(model, temperature=1.0)(packed)
    got = torch.tensor([logprob for result in results for logprob in result.logprobs])
    distance = (got - expected.float().cpu()).abs().sort().values
    return {
        "tokens": len(distance),
        "mean_entropy": float(entropies.mean()),
        "distance_mean": float(distance.mean()),
        "distance_p999": float(distance[int(0.999 * len(distance))]),
        "distance_max": float(distance[-1]),
    }


def compared(synced: dict[str, Any], loaded: dict[str, Any]) -> dict[str, Any]:
    """Compares two fingerprints."""
    return {
        f"{kind}_equal_bit_for_bit": sum(
            a == b for a, b in zip(synced[kind], loaded[kind], strict=True)
        )
        for kind in ("scores", "greedy")
    } | {"fingerprints": len(synced["scores"])}


async def measure(options: argparse.Namespace) -> None:
    """Measures everything about one engine; reports each part as soon as it is known."""
    is_cpu = not torch.cuda.is_available()
    dtype, device = (torch.float32, "cpu") if is_cpu else (torch.bfloat16, "cuda")
    arguments = json.loads(options.arguments)
    report = GrowingReport(
        options.out,
        {
            "engine": options.engine,
            "size": options.size,
            "device": "cpu" if is_cpu else torch.cuda.get_device_name(),
            "dtype": str(dtype),
            "torch": torch.__version__,
            "engine_arguments": arguments,
        },
    )
    folder: Path = options.folder
    if not (folder / "config.json").exists():
        model, loss = train(options.size, dtype, device, options.steps)
        model.save_pretrained(folder)
        report.add({"training_loss": loss})
        del model
    model = load_folder(folder, dtype=dtype, device=device)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    report.add({"weight_gb": round(sum(value.nbytes for value in weights.values()) / 1e9, 3)})
    started_at = time.perf_counter()
    async with open_engine(options, dtype, device, arguments, loads=False) as engine:
        report.add({"start_s": round(time.perf_counter() - started_at, 1)})
        report.add(await updates(engine, weights))
        synced = await fingerprint(engine)
        report.add({"itself": compared(synced, await fingerprint(engine))})
        todo = requests("s", 64, 128, NUM_SYMBOLS)
        results = await asyncio.gather(*[engine.generate(request) for request in todo])
        report.add(distances(model, todo, results))
    async with open_engine(options, dtype, device, arguments, loads=True) as engine:
        report.finish({"loaded": compared(synced, await fingerprint(engine))})


@asynccontextmanager
async def open_engine(
    options: argparse.Namespace,
    dtype: torch.dtype,
    device: str,
    arguments: dict[str, Any],
    *,
    loads: bool,
) -> AsyncIterator[Engine]:
    """Yields the engine, with random weights or with those of the folder."""
    config = make_config(options.size)
    if options.engine == "torch":
        if loads:
            model = load_folder(options.folder, dtype=dtype, device=device)
        else:
            model = build_model(config, dtype=dtype, device=device, seed=1)
        engine = TorchEngine(model, max_running=_MAX_RUNNING)
        async with serving(engine):
            yield engine
        return
    if loads:
        model_key = "model" if options.engine == "vllm" else "model_path"
        arguments = arguments | {"load_format": "auto", model_key: str(options.folder)}
    ordered = order(config, dtype=dtype, max_running=_MAX_RUNNING, arguments=arguments)
    async with opened(options.engine, ordered) as parted:
        yield parted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=["torch", "vllm", "sglang"])
    parser.add_argument("--size", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--arguments", default="{}", help="engine arguments, as JSON")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    asyncio.run(measure(options))


if __name__ == "__main__":
    main()
