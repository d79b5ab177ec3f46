"""The engines that serve, and foreign ones driven without our adapter."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch
from transformers import PretrainedConfig

from services.rollout.engines.base import Engine, GenerationRequest
from services.rollout.engines.build import make_backend
from services.rollout.engines.model_shape import model_shape
from services.rollout.engines.parted import PartedEngine

Directly = Callable[[str, Sequence[int], int], Any]
"""Generates: name, prompt, number of tokens."""


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[None]:
    """Let an engine run."""
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(engine.run())
        await engine.wait_ready()
        yield
        running.cancel()


@asynccontextmanager
async def opened(
    name: str,
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    max_running: int,
    arguments: dict[str, Any],
) -> AsyncIterator[tuple[PartedEngine, Directly]]:
    """An engine that serves, and how to drive it without the adapter."""
    backend: Any = make_backend(
        name,
        config,
        dtype=dtype,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        max_running=max_running,
        arguments=arguments,
    )
    directly = _drive_vllm(backend) if name == "vllm" else _drive_sglang(backend)
    engine = PartedEngine(backend, model_shape(config, dtype), max_running=max_running)
    async with serving(engine):
        yield engine, directly


def _drive_vllm(backend: Any) -> Directly:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    async def generate(name: str, prompt: Sequence[int], num_tokens: int) -> None:
        parameters = SamplingParams(
            max_tokens=num_tokens,
            seed=0,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        asked = {"prompt_token_ids": list(prompt), "cache_salt": "direct"}
        async for _ in backend.llm.generate(asked, parameters, name):
            pass

    return generate


def _drive_sglang(backend: Any) -> Directly:
    async def generate(name: str, prompt: Sequence[int], num_tokens: int) -> None:
        stream = await backend.engine.async_generate(
            input_ids=list(prompt),
            sampling_params={"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True},
            return_logprob=True,
            stream=True,
            rid=name,
        )
        async for _ in stream:
            pass

    return generate


def requests(
    name: str, count: int, num_tokens: int, vocab: int, **changes: Any
) -> list[GenerationRequest]:
    """Requests with prompts of 64 tokens."""
    values = {"temperature": 1.0} | changes
    return [
        GenerationRequest(
            request_id=f"{name}.{index}",
            context_ids=tuple((37 * index + place) % vocab for place in range(64)),
            max_tokens=num_tokens,
            seed=index,
            **values,
        )
        for index in range(count)
    ]
