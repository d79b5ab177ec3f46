"""Models with a vision tower on a GPU: packs equal the whole model on a CPU, and runs with images train."""

import asyncio
import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.models.loading import build_model, load_model, stored_tensors
from services.common.models.tokenizer import load_tokenizer
from services.rollout.engines.base import GenerationRequest
from services.rollout.engines.build import make_engine
from services.rollout.engines.engine_config import EngineConfig, ImageLimits
from services.trainer.batch.packing import pack
from services.trainer.model.policy import Policy
from services.wire.data.jagged import Jagged
from tests.helpers.batches import prompt_spans
from tests.helpers.cli import REPOSITORY, train
from tests.helpers.engines import running
from tests.helpers.vision import (
    KINDS,
    model_spec,
    plain_logprobs,
    random_prompt,
    saved_model,
    wide_config,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shares", [False, True])
def test_packed_logprobs_are_those_of_the_whole_model_on_a_cpu(
    kind: str, shares: bool, tmp_path: Path
) -> None:
    whole = saved_model(kind, tmp_path)
    spec = model_spec(tmp_path)
    model = load_model(spec, load_tokenizer(spec), dtype=torch.float32, device="cuda")
    rng = random.Random(0)
    rows = []
    for number in range(6):
        prompt, inputs = random_prompt(rng, number % 3)
        response = [rng.randrange(3, 64) for _ in range(5)]
        rows += [(prompt, response, inputs)] * 2
    expected = torch.cat([plain_logprobs(whole, *row) for row in rows])
    packed = pack(
        Jagged.from_list([torch.tensor(prompt) for prompt, _, _ in rows]),
        Jagged.from_list([torch.tensor(response) for _, response, _ in rows]),
        device=torch.device("cuda"),
        shares_prefixes=shares,
        inputs=prompt_spans([prompt for prompt, _, _ in rows], [inputs for _, _, inputs in rows]),
    )
    logprobs, _ = Policy(model, temperature=1.0)(packed)
    # The convolution that embeds patches computes in TF32.
    assert (logprobs.cpu() - expected).abs().max() <= 5e-3


def _needs(engine: str) -> None:
    if engine != "torch" and importlib.util.find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed here")


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_place", [False, True])
def test_logprobs_of_vllm_are_those_of_the_trainer_after_every_adoption(
    kind: str, in_place: bool
) -> None:
    _needs("vllm")
    asyncio.run(_compare_logprobs(kind, in_place=in_place))


async def _compare_logprobs(kind: str, *, in_place: bool) -> None:
    config = wide_config(kind, head_dim=64, initializer_range=0.02)
    engine_config = EngineConfig(
        config=config,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        max_running=8,
        arguments={"max_model_len": 256, "gpu_memory_utilization": 0.3, "enforce_eager": True},
        images=ImageLimits(max_images=4, max_tokens=128),
        is_written_in_place=in_place,
    )
    rng = random.Random(0)
    prompts = [random_prompt(rng, count) for count in (1, 2, 0, 3)]
    scores: list[Any] = []
    engine = make_engine("vllm", engine_config)
    async with asyncio.timeout(500), running(engine):
        await engine.wait_ready()
        for version, seed in enumerate((0, 1, 2, 3, 1)):
            model = build_model(config, dtype=torch.bfloat16, device="cuda", seed=seed)
            weights = {name: value.clone() for name, value in stored_tensors(model).items()}
            await engine.adopt_weights(version, weights)
            generations = [
                engine.generate(
                    GenerationRequest(
                        request_id=f"{version}.{number}",
                        context_ids=tuple(prompt),
                        max_tokens=24,
                        seed=number,
                        model_inputs=inputs,
                    )
                )
                for number, (prompt, inputs) in enumerate(prompts)
            ]
            results = await asyncio.gather(*generations)
            scores.append([await engine.score(*prompt) for prompt in prompts])
            packed = pack(
                Jagged.from_list([torch.tensor(prompt) for prompt, _ in prompts]),
                Jagged.from_list([torch.tensor(result.token_ids) for result in results]),
                device=torch.device("cuda"),
                inputs=prompt_spans(
                    [prompt for prompt, _ in prompts], [inputs for _, inputs in prompts]
                ),
            )
            expected, _ = Policy(model, temperature=1.0)(packed)
            got = torch.tensor([logprob for result in results for logprob in result.logprobs])
            assert (got - expected.cpu()).abs().mean() <= 5e-3
    # The same weights give the same scores bit for bit, although others were served in between.
    assert scores[4] == scores[1]
    assert scores[1] != scores[0]


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("torch", ("trainer.freeze_vision_tower=true",)),
        ("torch", ()),
        ("vllm", ("trainer.freeze_vision_tower=true",)),
        ("vllm", ("weight_sync.mode=inplace",)),
        ("vllm", ("topology.placement=colocated",)),
    ],
)
def test_a_run_with_images_trains_on_a_gpu(
    tmp_path: Path, engine: str, settings: tuple[str, ...]
) -> None:
    _needs(engine)
    settings = (
        f"rollout.engine={engine}",
        "rollout.replicas=1",
        "trainer.dtype=bfloat16",
        "trainer.steps=4",
        "validation.every=0",
        *settings,
    )
    result = train(REPOSITORY / "examples" / "images.yaml", tmp_path, *settings, timeout=500)
    assert result.code == 0, result.out[-2000:] + result.err[-4000:]
    assert result.summary["steps"] == 4
