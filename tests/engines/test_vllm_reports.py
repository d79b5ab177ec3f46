"""vLLM reports other tokens than those that it drew, which reach a response in the form of all engines.

Masks need vLLM's Model Runner V2, and so a GPU: here masks of vLLM's own classes are made by hand.
"""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from services.extras.external_engine.request_segments import RequestProgress, TokenChunk
from services.rollout.engines.base import EngineDiedError
from services.rollout.engines.engine_config import EngineConfig
from tests.helpers.engines import request

pytest.importorskip("vllm", reason="vllm is not installed here")

import numpy as np
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists, SamplingMaskLists

from services.extras.vllm import adapter
from services.extras.vllm.scheduler import TokenBatcher

CONFIG = EngineConfig(
    config=Qwen2Config(vocab_size=50, architectures=["Qwen2ForCausalLM"]),
    dtype=torch.float32,
    device=torch.device("cpu"),
    max_running=8,
    returns_masks=True,
    top_logprobs=64,
)
SUPPORTS = [[7, 3, 9], [4], [0, 49], [8, 2]]
"""Tokens that could be drawn for each of four tokens."""


def _step(
    name: str,
    support: list[int],
    *,
    offsets: bool = False,
    candidates: int = 0,
    reason: FinishReason | None = None,
) -> EngineCoreOutput:
    """Returns vLLM's output of a step: the first token of the support, with its mask and candidates."""
    token = support[0]
    ids = [token, *range(10, 10 + candidates)]
    logprobs = [-token / 8, *(-float(index + 1) for index in range(candidates))]
    mask = SamplingMaskLists(
        np.array(support, np.int32), np.array([0, len(support)]) if offsets else None
    )
    return EngineCoreOutput(
        name,
        [token],
        new_logprobs=LogprobsLists(
            np.array([ids]), np.array([logprobs], dtype=np.float32), np.zeros(1)
        ),
        new_sampling_mask=mask,
        finish_reason=reason,
    )


def _chunks(sent: list[EngineCoreOutput], **options: Any) -> list[TokenChunk]:
    async def read() -> list[TokenChunk]:
        backend = adapter.VllmBackend(CONFIG)
        stream = adapter._Stream(
            backend, "a#1", segment_id="a", request=request("a", (1, 2), **options)
        )
        for output in sent:
            stream.put(output)
        return [await stream.next() for _ in sent]

    return asyncio.run(read())


@pytest.mark.parametrize("offsets", [False, True])  # versions before 0.32 always have offsets
def test_masks_travel_with_their_tokens(offsets: bool) -> None:
    batcher = TokenBatcher(3, has_masks=True)
    sent = []
    for index, support in enumerate(SUPPORTS):
        reason = FinishReason.STOP if index == 3 else None
        sent += batcher.passed([_step("a", support, offsets=offsets, reason=reason)])
    assert [output.new_token_ids for output in sent] == [[7, 4, 0], [8]]
    first, second = _chunks(sent, top_k=3, returns_mask=True)
    assert first.sampling_mask.dtype == np.int32
    assert first.sampling_mask.tolist() == [~7, 3, 9, ~4, ~0, 49]
    assert second.sampling_mask.tolist() == [~8, 2]
    assert first.top_logprobs is None
    progress = RequestProgress(
        replace(request("a", (1, 2)), stop_texts=("4",)),
        lambda ids: "".join(map(str, ids)),
    )
    assert progress.extend(first, 0)
    assert progress.result("stop").sampling_mask.tolist() == [~7, 3, 9, ~4]


def test_a_step_of_several_tokens_has_several_masks() -> None:
    several = EngineCoreOutput(
        "a",
        [7, 4],
        new_logprobs=LogprobsLists(
            np.array([[7], [4]]), np.array([[-1.0], [-2.0]], np.float32), np.zeros(2)
        ),
        new_sampling_mask=SamplingMaskLists(np.array([7, 3, 9, 4], np.int32), np.array([0, 3, 4])),
    )
    batcher = TokenBatcher(3, has_masks=True)
    assert not batcher.passed([several])
    (chunk,) = _chunks(batcher.passed([_step("a", [0, 49])]), top_k=3, returns_mask=True)
    assert chunk.sampling_mask.tolist() == [~7, 3, 9, ~4, ~0, 49]


def test_a_missing_mask_ends_the_engine_with_the_reason() -> None:
    output = _step("a", [7, 3])
    output.new_sampling_mask = None
    (sent,) = TokenBatcher(1, has_masks=True).passed([output])
    with pytest.raises(EngineDiedError, match="could be drawn"):
        _chunks([sent], top_k=3, returns_mask=True)
    (chunk,) = _chunks([sent])
    assert chunk.sampling_mask is None


def test_candidates_travel_with_their_tokens() -> None:
    """A step has as many candidates as any of its requests asks for."""
    batcher = TokenBatcher(2)
    assert not batcher.passed([_step("a", [7], candidates=4)])
    (sent,) = batcher.passed([_step("a", [4], candidates=2)])
    (chunk,) = _chunks([sent], top_logprobs=2)
    assert chunk.logprobs == [-7 / 8, -4 / 8]
    rest = np.log(1 - np.exp(-1.0) - np.exp(-2.0))
    row = np.array([[10, -1.0], [11, -2.0], [-1, rest]], np.float32)
    assert np.allclose(chunk.top_logprobs, [row, row])
    (chunk,) = _chunks([sent])
    assert chunk.top_logprobs is None
    assert not batcher.passed([_step("b", [7])])
    (plain,) = batcher.passed([_step("b", [4], candidates=2)])
    assert plain.new_logprobs.logprobs.tolist() == [-7 / 8, -4 / 8]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 0.7, "top_k": 5, "top_p": 0.9}, (0.7, 5, 0.9)),
        ({"temperature": 0.7}, (0.7, 50, 1.0)),
        # vLLM refuses a temperature of 0 while it reports masks.
        ({"temperature": 0.0, "top_k": 5}, (1.0, 1, 1.0)),
    ],
)
def test_every_request_of_an_engine_with_masks_has_a_bound_of_their_size(
    options: dict[str, Any], expected: tuple[float, int, float]
) -> None:
    backend = adapter.VllmBackend(CONFIG)
    assert backend.capabilities.sampling_masks
    segment = RequestProgress(request("a", (1, 2), **options), None).next_segment("0")
    parameters: SamplingParams = backend._sampling(segment)
    assert (parameters.temperature, parameters.top_k, parameters.top_p) == expected
    arguments = backend.engine_args("folder")
    assert arguments.return_sampling_mask
    assert arguments.max_logprobs == 64


def test_the_first_model_runner_is_refused_with_the_keys(tmp_path: Any) -> None:
    """vLLM has no Model Runner V2 on a CPU."""
    config = Qwen2Config(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        architectures=["Qwen2ForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    arguments = adapter.VllmBackend(replace(CONFIG, config=config)).engine_args(str(tmp_path))
    with pytest.raises(ValueError, match=r"rollout\.sampling\.top_k .* Model Runner V2"):
        adapter.start(arguments, reports_experts=False)


def test_a_version_without_masks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_MASKS", "an_argument_of_a_later_version")
    with pytest.raises(ValueError, match=r"from version 0\.28 on, but"):
        adapter.build(CONFIG)
