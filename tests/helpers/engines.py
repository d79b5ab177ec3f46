"""Tiny models and engines."""

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from services.rollout.engines.base import Engine, GenerationRequest, GenerationResult
from services.rollout.engines.torch.engine import TorchEngine

VOCAB_SIZE = 24


def installed(*names: str) -> list[object]:
    """Returns pytest parameters for packages; those that are not installed are skipped."""
    return [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                importlib.util.find_spec(name) is None, reason=f"{name} is not installed here"
            ),
        )
        for name in names
    ]


def make_model(seed: int) -> PreTrainedModel:
    """Returns a random Qwen2 whose logits differ strongly between seeds."""
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).eval()


_reference_model = cache(make_model)
"""Models that no test changes, by seed."""


def weights_of(seed: int) -> dict[str, Tensor]:
    parameters = _reference_model(seed).named_parameters()
    return {name: value.detach().clone() for name, value in parameters}


def request(request_id: str, context: tuple[int, ...], **changes: object) -> GenerationRequest:
    values: dict[str, object] = {"max_tokens": 8, "seed": 1} | changes
    return GenerationRequest(request_id=request_id, context_ids=context, **values)  # type: ignore[arg-type]


def reference_logprobs(
    seed: int, context: tuple[int, ...], tokens: tuple[int, ...], temperature: float = 1.0
) -> Tensor:
    """Returns the logprobs of tokens after a context, from a plain forward pass."""
    ids = torch.tensor([context + tokens])
    with torch.no_grad():
        logits = _reference_model(seed)(ids).logits[0, len(context) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)


async def until(condition: Callable[[], bool], *, poll_s: float = 0.001) -> None:
    """Yields to other tasks until a condition is true. Raises TimeoutError after a minute.

    Args:
        poll_s: Seconds between checks; 0 checks in each iteration of the event loop, for an engine that
            samples all its tokens within a millisecond.
    """
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 -- an engine's steps set no event
            await asyncio.sleep(poll_s)


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(engine.run())
        yield
        task.cancel()


def make_engine(seed: int = 0, **changes: object) -> TorchEngine:
    arguments: dict[str, object] = {"max_running": 8} | changes
    return TorchEngine(make_model(seed), **arguments)  # type: ignore[arg-type]


def made(engine: Engine, num_tokens: int) -> Callable[[], bool]:
    """Returns a condition that is true once the engine has sampled ``num_tokens`` more tokens."""
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
