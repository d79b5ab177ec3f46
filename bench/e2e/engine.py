"""Measures the rate R of the limit: tokens per second of the engine alone, with all slots occupied.

``python -m bench.e2e.engine SHAPE [--smoke]`` prints it as JSON, with the seconds of the engine's
start.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import torch

from bench.e2e.shapes import SHAPES, Shape, smoke
from bench.rollout.driven import alone, order, serving
from services.common.models.loading import build_model
from services.common.task_group import TaskGroup
from services.rollout.engines.base import GenerationRequest
from services.rollout.engines.torch.engine import TorchEngine

_PROMPT_TOKENS = 100
_WARM_S, _MEASURED_S = 6.0, 8.0

Ask = Callable[[str, tuple[int, ...], int], Awaitable[None]]
"""Function that generates: name, prompt, number of tokens."""


@asynccontextmanager
async def _opened(shape: Shape, max_running: int) -> AsyncIterator[Ask]:
    dtype = getattr(torch, shape.dtype)
    if shape.engine == "torch":
        model = build_model(shape.config(), dtype=dtype, device="cpu", seed=0)
        engine = TorchEngine(model, max_running=max_running)

        async def ask(name: str, prompt: tuple[int, ...], num_tokens: int) -> None:
            await engine.generate(
                GenerationRequest(
                    request_id=name, context_ids=prompt, max_tokens=num_tokens, seed=0
                )
            )

        async with serving(engine):
            yield ask
        return
    async with alone(
        shape.engine, order(shape.config(), dtype=dtype, max_running=max_running)
    ) as directly:
        yield directly


async def measure(
    shape: Shape, *, max_running: int, seconds: tuple[float, float]
) -> dict[str, float]:
    """Keeps all slots occupied with responses of geometric length; returns the rate.

    Args:
        shape: Model and mean length.
        max_running: Concurrent requests.
        seconds: Seconds of the warm-up and of the measurement.
    """
    rng = random.Random(0)
    done = 0
    begin = time.perf_counter()
    async with _opened(shape, max_running) as ask:
        start_s = time.perf_counter() - begin

        async def keep_asking(place: int) -> None:
            nonlocal done
            for number in range(1_000_000):
                drawn = round(rng.expovariate(1 / shape.mean_response_tokens)) + 1
                length = min(drawn, shape.max_response_tokens)
                prompt = tuple(rng.randrange(2, 250) for _ in range(_PROMPT_TOKENS))
                await ask(f"{place}.{number}", prompt, length)
                done += length

        async with TaskGroup() as tasks:
            asking = [tasks.create_task(keep_asking(place)) for place in range(max_running)]
            await asyncio.sleep(seconds[0])
            before, since = done, time.perf_counter()
            await asyncio.sleep(seconds[1])
            rate = (done - before) / (time.perf_counter() - since)
            for task in asking:
                task.cancel()
    return {
        "tokens_per_s": round(rate, 1),
        "max_running": max_running,
        "start_s": round(start_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--smoke", action="store_true", help="a tiny model on any machine")
    parser.add_argument("--max-running", type=int, default=1024)
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    if arguments.smoke:
        measured = measure(smoke(shape), max_running=16, seconds=(1.0, 3.0))
    else:
        measured = measure(shape, max_running=arguments.max_running, seconds=(_WARM_S, _MEASURED_S))
    print(json.dumps(asyncio.run(measured)), flush=True)


if __name__ == "__main__":
    main()
