"""Requests and checks that contract tests share."""

import asyncio
from collections.abc import Callable, Sequence

import torch

from services.rollout.engines.base import Engine, GenerationResult
from tests.contract.engines import VOCAB_SIZE, expected_logprobs, request, weights

TOLERANCE = 1e-4
PROMPT = tuple(3 + (7 * i) % (VOCAB_SIZE - 3) for i in range(100))


async def until(condition: Callable[[], bool]) -> None:
    """Waits for a condition. Raises TimeoutError after a minute."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 -- engines announce no tokens
            await asyncio.sleep(0.001)


def made(engine: Engine, num_tokens: int) -> Callable[[], bool]:
    """Returns a condition: that many tokens were sampled since now."""
    before = engine.stats().tokens_total
    return lambda: engine.stats().tokens_total >= before + num_tokens


def begun(
    engine: Engine, contexts: Sequence[tuple[int, ...]], *, max_tokens: int
) -> list[asyncio.Task[GenerationResult]]:
    """Starts requests ``r0``, ``r1``, ... and returns their tasks."""
    return [
        asyncio.create_task(
            engine.generate(request(f"r{seed}", context, seed=seed, max_tokens=max_tokens))
        )
        for seed, context in enumerate(contexts)
    ]


async def adopt(engine: Engine, version: int, *, tied: bool = True) -> None:
    tensors = weights(version, tied=tied) if engine.weight_specs() else {}
    await engine.adopt_weights(version, tensors)


def assert_agrees(result: GenerationResult, context: tuple[int, ...], *, tied: bool = True) -> None:
    """Checks that each token has the logprob of its weight version after the whole context."""
    start = 0
    assert sum(count for _, count in result.version_runs) == len(result.token_ids)
    for version, count in result.version_runs:
        tokens = result.token_ids[start : start + count]
        before = context + result.token_ids[:start]
        expected = expected_logprobs(version, before, tokens, tied=tied)
        got = torch.tensor(result.logprobs[start : start + count])
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
        start += count
