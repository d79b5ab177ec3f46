"""vLLM on a GPU reports which tokens could be drawn, and the most likely ones, and runs train with both."""

import asyncio
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from services.rollout.engines.base import GenerationResult
from services.rollout.engines.build import make_engine
from services.rollout.engines.engine_config import EngineConfig
from tests.helpers.engines import request, running
from tests.helpers.gpu_runs import train_on_gpus, use_one_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
]
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
CONFIG = Qwen2Config(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    initializer_range=0.05,
    architectures=["Qwen2ForCausalLM"],
)
PROMPT = tuple(3 + (7 * i) % 250 for i in range(100))
TEMPERATURE = 0.8


def test_masks_and_most_likely_tokens_are_those_of_the_distribution() -> None:
    asyncio.run(_check_reports())


async def _check_reports() -> None:
    engine_config = EngineConfig(
        config=CONFIG,
        dtype=DTYPE,
        device=DEVICE,
        max_running=8,
        arguments={"max_model_len": 512, "gpu_memory_utilization": 0.3},
        returns_masks=True,
        top_logprobs=32,
    )
    engine = make_engine("vllm", engine_config)
    async with asyncio.timeout(800), running(engine):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(CONFIG).to(DEVICE, DTYPE).eval()
        weights = {name: value.detach() for name, value in model.named_parameters()}
        await engine.adopt_weights(0, weights)
        sampling = {"temperature": TEMPERATURE, "returns_mask": True, "max_tokens": 40}
        narrow, nucleus, greedy = await asyncio.gather(
            engine.generate(request("narrow", PROMPT, top_k=3, top_logprobs=32, **sampling)),
            engine.generate(request("nucleus", PROMPT, top_k=64, top_p=0.6, **sampling)),
            engine.generate(request("greedy", PROMPT, temperature=0.0, top_k=3, returns_mask=True)),
        )
        scored = await engine.score(PROMPT)
    assert len(scored) == len(PROMPT) - 1
    assert greedy.logprobs == (0.0,) * len(greedy.token_ids)
    sizes = [_check_masks(model, result) for result in (narrow, nucleus)]
    assert sizes[0] == [3] * 40
    assert 1 < max(sizes[1]) <= 64
    assert nucleus.top_logprobs is None
    assert narrow.top_logprobs is not None
    shares = torch.from_numpy(narrow.top_logprobs[:, :-1, 1]).double().exp()
    assert ((shares > 0).sum(1) == 3).all()
    torch.testing.assert_close(shares.sum(1), torch.ones(40).double(), atol=1e-5, rtol=0)


def _check_masks(model: PreTrainedModel, result: GenerationResult) -> list[int]:
    """Compares logprobs with those relative to the masks; returns the size of each mask."""
    assert result.sampling_mask is not None
    ids = torch.tensor([PROMPT + result.token_ids], device=DEVICE)
    with torch.no_grad():
        logits = model(ids).logits[0, len(PROMPT) - 1 : -1].float().cpu() / TEMPERATURE
    entries = result.sampling_mask.tolist()
    starts = [index for index, entry in enumerate(entries) if entry < 0]
    assert len(starts) == len(result.token_ids)
    expected, sizes = [], []
    for row, (start, end) in enumerate(zip(starts, [*starts[1:], len(entries)], strict=True)):
        token_ids = [~entries[start], *entries[start + 1 : end]]
        sizes.append(len(token_ids))
        index = token_ids.index(result.token_ids[row])
        expected.append(float(logits[row, token_ids].log_softmax(0)[index]))
    difference = (torch.tensor(result.logprobs) - torch.tensor(expected)).abs()
    # Logprobs of bfloat16 passes of two implementations.
    assert difference.mean() < 0.02
    assert difference.max() < 0.5
    return sizes


@pytest.mark.parametrize(
    "settings",
    [
        ("rollout.sampling.top_k=8", "rollout.sampling.top_p=0.9"),
        ("algorithm.loss=reinforce", "algorithm.score_centering=32"),
    ],
    ids=["masks", "centering"],
)
def test_a_run_trains_on_what_vllm_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...]
) -> None:
    use_one_gpu(monkeypatch)
    finished = train_on_gpus(
        tmp_path, "vllm", *settings, "trainer.steps=6", "validation.every=3", timeout=800
    )
    assert finished.summary["state"] == "SUCCEEDED"
    (metrics,) = (tmp_path / "runs").glob("*/metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert steps[0]["rollout_logprob_abs_diff"] < 0.05
