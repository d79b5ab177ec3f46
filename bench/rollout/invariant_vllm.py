"""Cost of vLLM's batch-invariant mode: ``python -m bench.rollout.invariant_vllm [--smoke]``.

Engines with random weights in the shapes of Qwen3-0.6B and Llama-3.2-1B, in bfloat16, decode 256 tokens for
each of 8, 64 and 256 requests, with the mode and without. Each engine runs in a separate process, because the
mode is an environment variable. ``cost`` is the time that a token takes, relative to that without the mode.
There is no bar. Results go to ``bench/results/rollout-invariant-vllm-cost.json``.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from bench.report import device_name, write_json
from bench.rollout.driven import make_config, opened, random_weights, requests
from bench.rollout.invariant import shapes

RESULTS = Path(__file__).parents[1] / "results" / "rollout-invariant-vllm-cost.json"
_MODES = ("plain", "batch_invariant")
_RUNNING = (8, 64, 256)
_TOKENS = 256
_VOCABULARY = 250
_REPEATS = 3
_DEADLINE_S = 400.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="default: all")
    parser.add_argument("--smoke", action="store_true", help="tiny models, the engine torch, a CPU")
    parser.add_argument("--mode", choices=_MODES, help="measures one engine in this process")
    arguments = parser.parse_args()
    models = arguments.models or [*shapes(is_large=not arguments.smoke)]
    if arguments.mode is not None:
        (model,) = models
        result = asyncio.run(_tokens_per_s(model, arguments.mode, is_smoke=arguments.smoke))
        print(json.dumps(result), flush=True)
        return
    entries = {}
    for model in models:
        rates = {mode: _in_own_process(model, mode, is_smoke=arguments.smoke) for mode in _MODES}
        plain, invariant = (rates[mode] for mode in _MODES)
        cost = {count: round(rate / invariant[count], 3) for count, rate in plain.items()}
        entries[model] = {"tokens_per_s": rates, "cost": cost}
        print(json.dumps({model: entries[model]}, indent=1), flush=True)
    if not arguments.smoke:
        write_json(RESULTS, {"device": device_name(), "tokens": _TOKENS, "models": entries})


def _in_own_process(model: str, mode: str, *, is_smoke: bool) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.rollout.invariant_vllm", model, "--mode", mode]
    done = subprocess.run(
        [*command, *(["--smoke"] if is_smoke else [])],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=_DEADLINE_S,
    )
    content: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return content


async def _tokens_per_s(model: str, mode: str, *, is_smoke: bool) -> dict[str, float]:
    """Returns tokens per second by number of requests that decode at once."""
    config = shapes(is_large=not is_smoke)[model]
    running, num_tokens = ((2, 4), 8) if is_smoke else (_RUNNING, _TOKENS)
    engine_arguments: dict[str, Any] = {"max_model_len": 1024, "gpu_memory_utilization": 0.6}
    is_invariant = mode == "batch_invariant"
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    engine_config = make_config(
        config,
        dtype=torch.float32 if is_smoke else torch.bfloat16,
        max_running=max(running),
        is_reproducible=is_invariant,
        is_invariant=is_invariant,
        arguments={} if is_smoke else engine_arguments,
    )
    result = {}
    async with opened("torch" if is_smoke else "vllm", engine_config) as engine:
        await engine.adopt_weights(0, random_weights(engine, engine_config))
        for count in running:
            times = []
            for repeat in range(_REPEATS + 1):
                todo = requests(f"{count}.{repeat}", count, num_tokens, _VOCABULARY)
                began = time.perf_counter()
                await asyncio.gather(*map(engine.generate, todo))
                times.append(time.perf_counter() - began)
            result[str(count)] = round(count * num_tokens / min(times[1:]), 1)
    return result


if __name__ == "__main__":
    main()
