"""Weight updates of an external engine while it decodes: ``python -m bench.rollout.engine_updates ENGINE``.

Requests run in every slot. Meanwhile, the engine adopts random weights again and again, and a task measures
how late the event loop wakes it: whatever delays it also delays the commands of a weight transfer, which
the same process answers. ``--set`` adds arguments of the engine, such as ``stream_interval=1``.
Results go to ``bench/results/engine-updates-ENGINE.json``, by device and arguments.
"""

import argparse
import asyncio
import json
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.e2e.shapes import SHAPES, Shape, smoke
from bench.report import read_json, write_json
from bench.rollout.driven import make_config, opened, random_weights
from services.rollout.engines.base import Engine, GenerationRequest

_RESULTS = Path(__file__).parents[1] / "results"
_PROMPT_TOKENS = 100
_PROBE_S = 0.005
_SMOKE_TOKENS = 1024
_WARM_UP = 2
"""Updates that do not count: the first ones open shared memory and compile."""


async def measure(
    engine: Engine, weights: dict[str, torch.Tensor], shape: Shape, options: argparse.Namespace
) -> dict[str, Any]:
    """Updates a busy engine.

    Args:
        engine: A started engine without weights.
        weights: All its weights.
        shape: Lengths of the responses.
        options: ``running``, ``updates`` and ``every_s``.
    """
    await engine.adopt_weights(0, weights)
    delays: list[float] = []
    async with asyncio.TaskGroup() as tasks:
        loads = [
            tasks.create_task(_keep_asking(engine, slot, shape)) for slot in range(options.running)
        ]
        loads.append(tasks.create_task(_probe(delays)))
        await asyncio.sleep(options.warm_up_s)
        result = await _update(engine, weights, options, delays)
        for task in loads:
            task.cancel()
    return result


async def _update(
    engine: Engine,
    weights: dict[str, torch.Tensor],
    options: argparse.Namespace,
    delays: list[float],
) -> dict[str, Any]:
    adopted, stalls = [], []
    begin, tokens, processor_s = time.perf_counter(), 0, 0.0
    for number in range(1, _WARM_UP + options.updates + 1):
        if number == _WARM_UP + 1:
            delays.clear()
            begin, tokens = time.perf_counter(), engine.stats().tokens_total
            processor_s = _processor_s()
        await asyncio.sleep(options.every_s)
        asked_at = time.perf_counter()
        stalls.append(await engine.adopt_weights(number, weights))
        adopted.append(time.perf_counter() - asked_at)
    elapsed_s = time.perf_counter() - begin
    used_s, num_tokens = _processor_s() - processor_s, engine.stats().tokens_total - tokens
    return {
        "updates": options.updates,
        "running": options.running,
        "adopt_ms": _percentiles(adopted[_WARM_UP:]),
        "stall_ms": _percentiles(stalls[_WARM_UP:]),
        "event_loop_late_ms": _percentiles(delays),
        "tokens_per_s": round(num_tokens / elapsed_s, 1),
        "rollout_processor_share": round(used_s / elapsed_s, 3),
        "rollout_processor_us_per_token": round(1e6 * used_s / max(num_tokens, 1), 1),
        "adopt_each_ms": [round(1e3 * seconds, 1) for seconds in adopted[_WARM_UP:]],
    }


async def _keep_asking(engine: Engine, slot: int, shape: Shape) -> None:
    for number in range(1_000_000):
        seed = slot * 1_000_003 + number
        prompt = tuple(
            (37 * seed + position) % shape.vocabulary for position in range(_PROMPT_TOKENS)
        )
        await engine.generate(
            GenerationRequest(
                request_id=f"{slot}.{number}",
                context_ids=prompt,
                max_tokens=shape.max_response_tokens,
                seed=seed,
            )
        )


async def _probe(delays: list[float]) -> None:
    while True:
        due = time.perf_counter() + _PROBE_S
        await asyncio.sleep(_PROBE_S)
        delays.append(time.perf_counter() - due)


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Returns median, 95th percentile, max and the ratio of the first two, in milliseconds."""
    by_size = sorted(seconds)
    median, late = statistics.median(by_size), by_size[int(0.95 * (len(by_size) - 1))]
    return {
        "p50": round(1e3 * median, 2),
        "p95": round(1e3 * late, 2),
        "max": round(1e3 * by_size[-1], 2),
        "p95_over_p50": round(late / median, 2),
    }


async def _run(options: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    changes = {"arguments": dict(options.set)} if options.set else {}
    config = make_config(
        shape.config(), dtype=getattr(torch, shape.dtype), max_running=options.running, **changes
    )
    begin = time.perf_counter()
    async with opened(options.engine, config) as engine:
        start_s = time.perf_counter() - begin
        weights = random_weights(engine, config)
        return {
            "start_s": round(start_s, 1),
            **await measure(engine, weights, shape, options),
        }


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=("sglang", "vllm"))
    parser.add_argument("--shape", choices=SHAPES, default="tail")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on any machine")
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--every-s", type=float, default=0.5, help="time between two updates")
    parser.add_argument("--warm-up-s", type=float, default=3.0, help="time before the first update")
    parser.add_argument("--set", type=_setting, action="append", default=[])
    parser.add_argument(
        "--out", type=Path, help="default: bench/results/engine-updates-ENGINE.json"
    )
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    if options.smoke:
        shape = replace(smoke(shape), max_response_tokens=_SMOKE_TOKENS)
    result = asyncio.run(_run(options, shape))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    name = ", ".join([device, *(f"{key}={value}" for key, value in options.set)])
    print(json.dumps({name: result}), flush=True)
    results = options.out or _RESULTS / f"engine-updates-{options.engine}.json"
    write_json(results, read_json(results) | {name: result})


if __name__ == "__main__":
    main()
