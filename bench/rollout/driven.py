"""Engines under load: behind our adapter, or alone."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch

from services.rollout.engines.base import Engine, GenerationRequest
from services.rollout.engines.build import make_engine
from services.rollout.engines.engine_config import EngineConfig

Directly = Callable[[str, Sequence[int], int], Any]
"""Function that generates: name, prompt, number of tokens."""


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[None]:
    """Runs an engine during the block."""
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(engine.run())
        await engine.wait_ready()
        yield
        running.cancel()


def make_config(
    config: Any, *, dtype: torch.dtype, max_running: int, **changes: Any
) -> EngineConfig:
    """Returns the configuration of an engine, on the GPU if there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return EngineConfig(
        config=config, dtype=dtype, device=device, max_running=max_running, **changes
    )


@asynccontextmanager
async def opened(name: str, engine_config: EngineConfig) -> AsyncIterator[Engine]:
    """Yields a running engine with its adapter."""
    engine = make_engine(name, engine_config)
    async with serving(engine):
        yield engine


@asynccontextmanager
async def alone(name: str, engine_config: EngineConfig) -> AsyncIterator[Directly]:
    """Yields another project's engine without our adapter; it returns once, at the end, with logprobs."""
    # The engine has the adapter's environment and arguments for this device.
    engine: Any = make_engine(name, engine_config)
    if name == "sglang":
        async with serving(engine):
            yield _ask_sglang(engine.backend.engine)
        return
    from vllm.v1.engine.async_llm import AsyncLLM

    with tempfile.TemporaryDirectory() as folder:
        engine_config.config.save_pretrained(folder)
        arguments = engine.backend.engine_args(folder)
        llm = await asyncio.to_thread(AsyncLLM.from_engine_args, arguments)
    try:
        yield _ask_vllm(llm)
    finally:
        llm.shutdown()


def _ask_vllm(llm: Any) -> Directly:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    async def generate(name: str, prompt: Sequence[int], num_tokens: int) -> None:
        parameters = SamplingParams(
            max_tokens=num_tokens,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async for _ in llm.generate({"prompt_token_ids": list(prompt)}, parameters, name):
            pass

    return generate


def _ask_sglang(engine: Any) -> Directly:
    async def generate(name: str, prompt: Sequence[int], num_tokens: int) -> None:
        await engine.async_generate(
            input_ids=list(prompt),
            sampling_params={"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True},
            return_logprob=True,
            rid=name,
        )

    return generate


def random_weights(engine: Engine, engine_config: EngineConfig) -> dict[str, torch.Tensor]:
    """Returns all weights of an engine; norms are one."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": engine_config.dtype, "device": engine_config.device}
    return {
        spec.name: torch.ones(spec.shape, **options)
        if spec.name.endswith("norm.weight")
        else torch.randn(spec.shape, **options) * 0.02
        for spec in engine.weight_specs()
    }


def requests(
    name: str, count: int, num_tokens: int, vocab: int, **changes: Any
) -> list[GenerationRequest]:
    """Returns requests with prompts of 64 tokens."""
    values = {"temperature": 1.0} | changes
    return [
        GenerationRequest(
            request_id=f"{name}.{index}",
            context_ids=tuple((37 * index + position) % vocab for position in range(64)),
            max_tokens=num_tokens,
            seed=index,
            **values,
        )
        for index in range(count)
    ]
