"""Measures the rate R of the limit: tokens per second of the engine alone, with all slots occupied.

``python -m bench.e2e.engine SHAPE [--running N ...] [--smoke]`` prints it as JSON, a line for each number
of concurrent requests, with the seconds of the engine's start.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import torch

from bench.e2e.shapes import SHAPES, Shape, smoke
from bench.rollout.driven import alone, make_config, serving
from services.common.models.loading import build_model
from services.common.task_group import TaskGroup
from services.rollout.engines.base import GenerationRequest
from services.rollout.engines.torch.engine import TorchEngine

_PROMPT_TOKENS = 100
_PER_SLOT = 2
"""Mean number of responses per slot in the warm-up, and again in the measurement. After the warm-up, contexts
have the lengths of a long run."""

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
        shape.engine, make_config(shape.config(), dtype=dtype, max_running=max_running)
    ) as directly:
        yield directly


async def measure(shape: Shape, running: Sequence[int]) -> AsyncIterator[dict[str, float]]:
    """Yields the rate with each number of concurrent requests, whose lengths are geometric.

    Args:
        shape: Model and mean length.
        running: Numbers of concurrent requests.
    """
    begin = time.perf_counter()
    async with _opened(shape, max(running)) as ask:
        start_s = time.perf_counter() - begin
        for count in running:
            yield {
                "tokens_per_s": round(await _rate(ask, shape, count), 1),
                "max_running": count,
                "start_s": round(start_s, 1),
            }


async def _rate(ask: Ask, shape: Shape, running: int) -> float:
    """Returns tokens per second with a number of concurrent requests."""
    rng = random.Random(0)
    lengths: list[int] = []
    warm, measured = asyncio.Event(), asyncio.Event()

    async def keep_asking(slot: int) -> None:
        for number in range(1_000_000):
            num_tokens = round(rng.expovariate(1 / shape.mean_response_tokens)) + 1
            length = min(num_tokens, shape.max_response_tokens)
            prompt = tuple(rng.randrange(2, 250) for _ in range(_PROMPT_TOKENS))
            await ask(f"{running}.{slot}.{number}", prompt, length)
            lengths.append(length)
            if len(lengths) >= _PER_SLOT * running:
                warm.set()
            if len(lengths) >= 2 * _PER_SLOT * running:
                measured.set()

    async with TaskGroup() as tasks:
        asking = [tasks.create_task(keep_asking(slot)) for slot in range(running)]
        await warm.wait()
        before, since = len(lengths), time.perf_counter()
        await measured.wait()
        rate = sum(lengths[before:]) / (time.perf_counter() - since)
        for task in asking:
            task.cancel()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--smoke", action="store_true", help="a tiny model on any machine")
    parser.add_argument("--running", type=int, nargs="+", default=[1024])
    arguments = parser.parse_args()
    shape, running = SHAPES[arguments.shape], arguments.running
    if arguments.smoke:
        shape, running = smoke(shape), [8, 16]

    async def report() -> None:
        async for rate in measure(shape, running):
            print(json.dumps(rate), flush=True)

    asyncio.run(report())


if __name__ == "__main__":
    main()
