"""Requests and checks that contract tests share."""

from functools import partial

import torch

from services.rollout.engines.base import Engine, GenerationResult
from tests.contract.engines import VOCAB_SIZE, expected_logprobs, weights
from tests.helpers import engines as helpers

TOLERANCE = 1e-4
PROMPT = tuple(3 + (7 * i) % (VOCAB_SIZE - 3) for i in range(100))


until = partial(helpers.until, poll_s=0.001)
"""Waits for a condition; checks once per millisecond, to leave the CPUs to the engine's child process."""


async def adopt(engine: Engine, version: int, *, tied: bool = True) -> None:
    tensors = weights(version, tied=tied) if engine.weight_specs() else {}
    await engine.adopt_weights(version, tensors)


def assert_agrees(result: GenerationResult, context: tuple[int, ...], *, tied: bool = True) -> None:
    """Checks that each token has the logprob that its weight version gives after the whole context."""
    start = 0
    assert sum(count for _, count in result.version_runs) == len(result.token_ids)
    for version, count in result.version_runs:
        tokens = result.token_ids[start : start + count]
        before = context + result.token_ids[:start]
        expected = expected_logprobs(version, before, tokens, tied=tied)
        got = torch.tensor(result.logprobs[start : start + count])
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
        start += count
