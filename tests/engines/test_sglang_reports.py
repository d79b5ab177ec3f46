"""A request that SGLang refuses ends its engine with SGLang's message instead of being repeated forever."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from services.rollout.engines.base import EngineDiedError
from services.rollout.engines.engine_config import EngineConfig
from tests.helpers.engines import request

pytest.importorskip("sglang", reason="sglang is not installed here")

from services.extras.sglang import adapter

CONFIG = EngineConfig(
    config=Qwen2Config(vocab_size=50, architectures=["Qwen2ForCausalLM"]),
    dtype=torch.float32,
    device=torch.device("cpu"),
    max_running=8,
    returns_masks=True,
)


def _reason(finish: dict[str, Any]) -> str | None:
    """Returns the finish reason of a segment whose only output is empty."""

    async def outputs() -> AsyncIterator[dict[str, Any]]:
        yield {"meta_info": {"finish_reason": finish, "output_token_logprobs": []}}

    async def read() -> str | None:
        stream = adapter._Stream(
            adapter.SglangBackend(CONFIG),
            "a;",
            outputs(),
            request("a", (1, 2), top_k=3, returns_mask=True),
            experts_from=0,
            num_top=0,
        )
        return (await stream.next()).finish_reason

    return asyncio.run(read())


def test_a_refused_request_ends_the_engine_with_the_reason() -> None:
    refusal = {"type": "abort", "message": "top_k is too large", "status_code": 400}
    with pytest.raises(EngineDiedError, match="top_k is too large"):
        _reason(refusal)
    assert _reason({"type": "abort", "message": "Aborted", "status_code": None}) == "abort"


def test_an_engine_with_masks_says_so_and_samples_without_ties() -> None:
    backend = adapter.SglangBackend(CONFIG)
    assert backend.capabilities.sampling_masks
    assert backend._arguments["sampling_backend"] == "pytorch"


def test_tokens_arrive_together_unless_the_arguments_say_otherwise() -> None:
    assert adapter.SglangBackend(CONFIG)._arguments["stream_interval"] > 1
    single = replace(CONFIG, arguments={"stream_interval": 1})
    assert adapter.SglangBackend(single)._arguments["stream_interval"] == 1
