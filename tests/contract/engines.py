"""Engines of the contract tests: each opens with a tiny model, or is skipped if it is not installed."""

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from services.common.runspec.engines import ENGINES
from services.common.runspec.rollout import SpeculationSpec
from services.extras.fake_engine.engine import FakeEngine, LongTail
from services.rollout.engines.base import Engine
from services.rollout.engines.build import make_engine
from services.rollout.engines.engine_config import EngineConfig
from services.rollout.engines.torch.engine import TorchEngine
from tests.helpers.engines import running

VOCAB_SIZE = 256
MAX_MODEL_TOKENS = 512

OpenEngine = Callable[..., AbstractAsyncContextManager[Engine]]


def model_config(*, tied: bool = True) -> Qwen2Config:
    """Returns a configuration that every engine supports, with grouped heads of 32 dimensions."""
    return Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        max_position_embeddings=MAX_MODEL_TOKENS,
        initializer_range=0.2,
        architectures=["Qwen2ForCausalLM"],
    )


def make_model(version: int, *, tied: bool = True) -> PreTrainedModel:
    """Returns the model of a weight version; versions differ strongly."""
    with torch.random.fork_rng():
        torch.manual_seed(1000 + version)
        return Qwen2ForCausalLM(model_config(tied=tied)).eval()


def weights(version: int, *, tied: bool = True) -> dict[str, Tensor]:
    """Returns the checkpoint tensors of a version; tied tensors occur once."""
    model = make_model(version, tied=tied)
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def decode(token_ids: Sequence[int]) -> str:
    """Returns a text of two characters for each token."""
    return "".join(f"{token:02x}" for token in token_ids)


def all_logprobs(
    version: int,
    context: tuple[int, ...],
    tokens: tuple[int, ...],
    *,
    tied: bool = True,
    temperature: float = 1.0,
) -> Tensor:
    """Returns log-probabilities ``[N, V]`` at the tokens after a context, from a plain forward pass."""
    ids = torch.tensor([context + tokens])
    with torch.no_grad():
        logits = make_model(version, tied=tied)(ids).logits[0, len(context) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, dim=-1)


def expected_logprobs(
    version: int, context: tuple[int, ...], tokens: tuple[int, ...], **changes: Any
) -> Tensor:
    """Returns log-probabilities ``[N]`` of tokens after a context."""
    logprobs = all_logprobs(version, context, tokens, **changes)
    return logprobs.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)


SPECULATION = SpeculationSpec(tokens=3, prompt_lookup_min=1)
"""Speculation that proposes after one equal token, so that the random model has many proposals."""


@asynccontextmanager
async def open_torch(
    *,
    tied: bool = True,
    kv_policy: str = "recompute",
    in_place: bool = False,
    speculation: SpeculationSpec | None = None,
) -> AsyncIterator[Engine]:
    """Yields the embedded engine, whose weights can always be written in place."""
    engine = TorchEngine(
        make_model(-1, tied=tied),
        max_running=8,
        kv_policy=kv_policy,
        decode=decode,
        speculation=speculation,
    )
    async with running(engine):
        yield engine


def open_torch_ngram(**options: Any) -> AbstractAsyncContextManager[Engine]:
    """Yields the embedded engine with n-gram speculation."""
    return open_torch(**options, speculation=SPECULATION)


@asynccontextmanager
async def open_fake(**_: object) -> AsyncIterator[Engine]:
    """Yields the fake engine, which has no model."""
    engine = FakeEngine(
        max_running=8, step_seconds=lambda _: 1e-3, lengths=LongTail(median=10_000, sigma=0.1)
    )
    async with running(engine):
        yield engine


_open: dict[str, tuple[Engine, asyncio.Task[None]]] = {}
"""Engines in child processes by name, which tests share because their start takes long."""


@asynccontextmanager
async def _shared(name: str, build: Callable[[], Engine]) -> AsyncIterator[Engine]:
    """Yields a shared engine; closes it if the test fails, so that the next test starts a new one."""
    if name not in _open:
        engine = build()
        _open[name] = engine, asyncio.ensure_future(engine.run())
    engine, serving = _open[name]
    try:
        async with asyncio.timeout(300):
            await asyncio.wait(
                [asyncio.ensure_future(engine.wait_ready()), serving],
                return_when=asyncio.FIRST_COMPLETED,
            )
        if serving.done():
            serving.result()
        yield engine
        assert engine.stats().num_running == engine.stats().num_waiting == 0
    except BaseException:
        await _close(name)
        raise


async def _close(name: str) -> None:
    if name not in _open:
        return  # a test that failed has closed it
    _, serving = _open.pop(name)
    serving.cancel()
    await asyncio.wait([serving])


async def close_shared() -> None:
    """Closes all shared engines."""
    for name in [*_open]:
        await _close(name)


def _open_engine(
    name: str,
    *,
    tied: bool,
    arguments: dict[str, Any],
    in_place: bool = False,
    returns_masks: bool = False,
) -> AbstractAsyncContextManager[Engine]:
    engine_config = EngineConfig(
        config=model_config(tied=tied),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_running=8,
        decode=decode,
        arguments=arguments,
        is_written_in_place=in_place,
        returns_masks=returns_masks,
        sleeps=True,
    )
    return _shared(f"{name} tied={tied} {in_place}", lambda: make_engine(name, engine_config))


def open_vllm(*, tied: bool = True, in_place: bool = False) -> AbstractAsyncContextManager[Engine]:
    """Yields vLLM on the CPU; the test prompt fills some of its cache blocks of 32 tokens."""
    arguments = {
        "max_model_len": MAX_MODEL_TOKENS,
        "enable_prefix_caching": True,
        # So few that prompts that arrive together do not fit into one step.
        "max_num_batched_tokens": MAX_MODEL_TOKENS,
        "kv_cache_memory_bytes": 64 << 20,
    }
    return _open_engine("vllm", tied=tied, arguments=arguments, in_place=in_place)


def open_sglang(
    *, tied: bool = True, in_place: bool = False
) -> AbstractAsyncContextManager[Engine]:
    """Yields SGLang on the CPU, which never changes the layout of weights."""
    return _open_engine("sglang", tied=tied, arguments={}, returns_masks=True)


def _param(name: str, open_engine: OpenEngine, *, needs: str | None = None) -> Any:
    is_missing = needs is not None and importlib.util.find_spec(needs) is None
    mark = pytest.mark.skipif(is_missing, reason=f"{needs} is not installed here")
    return pytest.param(open_engine, id=name, marks=mark)


REAL_ENGINES = [
    _param("torch", open_torch),
    _param("vllm", open_vllm, needs="vllm"),
    _param("sglang", open_sglang, needs="sglang"),
]
# Speculation in vLLM needs a GPU; tests/gpu tests it.
SPECULATING_ENGINES = [_param("torch-ngram", open_torch_ngram)]
ALL_ENGINES = [*REAL_ENGINES, _param("fake", open_fake)]
SLEEPERS = [param for param in REAL_ENGINES if ENGINES[param.id].sleeps]
ALL_SLEEPERS = [param for param in ALL_ENGINES if ENGINES[param.id].sleeps]
