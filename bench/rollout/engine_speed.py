"""Compares vLLM or SGLang through the adapter with the engine alone: tokens/s, CPU time, cost of updates.

Usage: ``python -m bench.rollout.engine_speed vllm [--smoke] [--running 512 1024] [--out FILE]``,
where the engine is installed; about four minutes with CUDA graphs. ``--smoke`` runs a tiny model on
a CPU.

All slots are filled at once with responses of equal length, with logprobs. ``share`` is the rate
through the adapter over that of the engine alone, each with a separate engine, one after the other.
The CPU time is that of the calling process, where adapter and front end run. ``updates`` adopts
weights during generation: it reports the seconds without a token, and the additional time of the
whole batch per update, with caches recomputed (``recompute``) or kept (``keep``).

Bars: ``share`` >= .97, ``cpu_us_per_token`` through the adapter <= 12.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config

from bench.report import GrowingReport
from bench.rollout.driven import alone, opened, order, requests
from services.common.task_group import TaskGroup
from services.rollout.engines.base import Engine
from services.rollout.engines.engine_config import EngineConfig

_VOCABULARY = 258


def config(*, is_tiny: bool) -> Qwen2Config:
    """Returns a model of 1.31 B parameters with a small vocabulary, or the smallest for all engines."""
    hidden, intermediate, layers, heads = (64, 128, 2, 2) if is_tiny else (2048, 5632, 28, 16)
    return Qwen2Config(
        vocab_size=_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        architectures=["Qwen2ForCausalLM"],
    )


async def timed(asked: Sequence[Awaitable[Any]], num_tokens: int) -> dict[str, float]:
    """Returns rate and CPU time of requests that all run at once."""
    began, began_cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*asked)
    seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    total = len(asked) * num_tokens
    return {
        "tokens_per_s": round(total / seconds, 1),
        "cpu_us_per_token": round(1e6 * cpu / total, 2),
        "seconds": round(seconds, 3),
    }


def median(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the median of each value."""
    return {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}


async def behind_adapter(
    name: str, ordered: EngineConfig, *, num_tokens: int, repeats: int, num_updates: int
) -> dict[str, Any]:
    """Measures an engine through its adapter, without and with weight updates."""
    async with opened(name, ordered) as engine:
        weights = {
            spec.name: torch.randn(spec.shape, dtype=ordered.dtype, device=ordered.device) * 0.02
            for spec in engine.weight_specs()
        }
        await engine.adopt_weights(0, weights)

        async def ask(label: str) -> dict[str, float]:
            todo = requests(label, ordered.max_running, num_tokens, _VOCABULARY)
            return await timed([engine.generate(request) for request in todo], num_tokens)

        await ask("warm")
        calm = median([await ask(f"calm{index}") for index in range(repeats)])
        async with TaskGroup() as tasks:
            running = tasks.create_task(ask("updated"))
            stalls = await _update(engine, weights, calm["seconds"], num_updates)
            disturbed = await running
    extra = (disturbed["seconds"] - calm["seconds"]) / max(len(stalls), 1)
    return {
        **calm,
        "updates": {
            "kv_policy": ordered.kv_policy,
            "stall_ms": [round(1e3 * stall, 1) for stall in stalls],
            "extra_ms_per_update": round(1e3 * extra, 1),
            "tokens_per_s": disturbed["tokens_per_s"],
        },
    }


async def _update(
    engine: Engine, weights: dict[str, torch.Tensor], seconds: float, count: int
) -> list[float]:
    """Adopts weights several times while requests run; returns the seconds without a token of each."""
    stalls = []
    for version in range(1, count + 1):
        await asyncio.sleep(seconds / (count + 1))
        stalls.append(await engine.adopt_weights(version, weights))
    return stalls


async def by_itself(
    name: str, ordered: EngineConfig, *, num_tokens: int, repeats: int
) -> dict[str, float]:
    """Measures the engine alone."""
    async with alone(name, ordered) as directly:

        async def ask(label: str) -> dict[str, float]:
            todo = requests(label, ordered.max_running, num_tokens, _VOCABULARY)
            asked = [directly(one.request_id, one.context_ids, num_tokens) for one in todo]
            return await timed(asked, num_tokens)

        await ask("warm")
        return median([await ask(f"calm{index}") for index in range(repeats)])


async def measure(options: argparse.Namespace) -> None:
    """Measures with each number of running requests."""
    arguments = json.loads(options.arguments)
    report = GrowingReport(options.out, {"engine": options.engine, "arguments": arguments})
    num_tokens, repeats = (64, 2) if options.smoke else (512, 3)
    found: dict[str, Any] = {}
    for running in (16,) if options.smoke else options.running:
        ordered = order(
            config(is_tiny=options.smoke),
            dtype=torch.float32 if options.smoke else torch.bfloat16,
            max_running=running,
            arguments={"max_model_len": 2048} | arguments
            if options.engine == "vllm"
            else arguments,
        )
        sizes = {"num_tokens": num_tokens, "repeats": repeats}
        row: dict[str, Any] = {"alone": await by_itself(options.engine, ordered, **sizes)}
        for policy in ("recompute", "keep") if options.engine == "vllm" else ("recompute",):
            row[f"adapter_{policy}"] = await behind_adapter(
                options.engine, replace(ordered, kv_policy=policy), num_updates=4, **sizes
            )
        row["share"] = round(
            row["adapter_recompute"]["tokens_per_s"] / row["alone"]["tokens_per_s"], 3
        )
        found[f"running_{running}"] = row
        report.add(found)
    report.finish(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=["vllm", "sglang"])
    parser.add_argument("--smoke", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--running", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--arguments", default="{}", help="engine arguments, as JSON")
    parser.add_argument("--out", type=Path)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
