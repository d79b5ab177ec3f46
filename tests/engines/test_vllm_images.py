"""Images in vLLM: logprobs after every update are those of the trainer, and caches know the images."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here")

import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.common.models.loading import build_model, stored_tensors
from services.rollout.engines.base import Engine, GenerationRequest
from services.rollout.engines.build import make_engine
from services.rollout.engines.engine_config import EngineConfig, ImageLimits
from services.trainer.batch.packing import pack
from services.trainer.model.policy import Policy
from services.wire.data.jagged import Jagged
from services.wire.data.model_inputs import ModelInputs
from tests.helpers.batches import prompt_spans
from tests.helpers.cli import REPOSITORY, train
from tests.helpers.engines import running, until
from tests.helpers.vision import IMAGE, random_prompt, wide_config

pytestmark = pytest.mark.timeout(900)
_SEEDS = (0, 1, 2, 3, 1)
"""Seeds of the weights that are sent one after the other."""
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 5e-3}


@asynccontextmanager
async def serving(
    config: Any, dtype: torch.dtype = torch.float32, *, in_place: bool = False
) -> AsyncIterator[Engine]:
    order = EngineConfig(
        config=config,
        dtype=dtype,
        device=torch.device("cpu"),
        max_running=4,
        arguments={
            "max_model_len": 256,
            "max_num_batched_tokens": 256,
            "kv_cache_memory_bytes": 64 << 20,
        },
        images=ImageLimits(max_images=4, max_tokens=128),
        is_written_in_place=in_place,
    )
    engine = make_engine("vllm", order)
    async with asyncio.timeout(800), running(engine):
        await engine.wait_ready()
        yield engine


def model_of(config: Any, seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Returns a model with weights of a seed; in float32, no tensor of it is constant."""
    model = build_model(deepcopy(config), dtype=dtype, device="cpu", seed=seed)
    if dtype != torch.float32:
        return model
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


async def adopt(engine: Engine, version: int, model: PreTrainedModel) -> None:
    tensors = {name: value.detach().clone() for name, value in stored_tensors(model).items()}
    await engine.adopt_weights(version, tensors)


def request(name: str, context: Sequence[int], given: ModelInputs, **changes: Any) -> Any:
    values = {"max_tokens": 12, "seed": 3, **changes}
    return GenerationRequest(
        request_id=name, context_ids=tuple(context), model_inputs=given, **values
    )


@torch.no_grad()
def expected(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], given: ModelInputs
) -> Tensor:
    """Returns the trainer's logprobs."""
    packed = pack(
        Jagged.from_list([torch.tensor(prompt)]),
        Jagged.from_list([torch.tensor(response)]),
        device=torch.device("cpu"),
        inputs=prompt_spans([prompt], [given]),
    )
    return Policy(model, temperature=1.0)(packed)[0]


def far(got: Sequence[float], wanted: Tensor) -> float:
    return float((torch.tensor(got) - wanted).abs().mean())


@pytest.mark.parametrize(
    ("kind", "dtype", "in_place"),
    [
        pytest.param("qwen2_5_vl", torch.float32, True, id="vllm-qwen2_5_vl-in-place"),
        *(
            pytest.param(kind, dtype, False, id=f"vllm-{kind}-{dtype}", marks=pytest.mark.nightly)
            for kind in ("qwen2_5_vl", "qwen3_vl")
            for dtype in (torch.float32, torch.bfloat16)
        ),
    ],
)
async def test_logprobs_are_those_of_the_trainer_after_every_adoption(
    kind: str, dtype: torch.dtype, in_place: bool
) -> None:
    is_exact = dtype == torch.float32
    config = wide_config(kind, initializer_range=0.1 if is_exact else 0.02)
    rng = random.Random(0)
    prompts = [random_prompt(rng, count) for count in (1, 2, 0, 3)]
    scores = []
    async with serving(config, dtype, in_place=in_place) as engine:
        for version, seed in enumerate(_SEEDS):
            model = model_of(config, seed, dtype)
            await adopt(engine, version, model)
            asked = [
                engine.generate(request(f"{version}.{number}", *prompt, seed=number))
                for number, prompt in enumerate(prompts)
            ]
            for (prompt, given), result in zip(prompts, await asyncio.gather(*asked), strict=True):
                wanted = expected(model, prompt, result.token_ids, given)
                assert far(result.logprobs, wanted) <= _TOLERANCES[dtype]
            scores.append([await engine.score(*prompt) for prompt in prompts])
            wanted = expected(model, prompts[3][0][:1], prompts[3][0][1:], prompts[3][1])
            assert far(scores[-1][3], wanted) <= _TOLERANCES[dtype]
    # The same weights with others in between: nothing of those is left, bit for bit.
    assert scores[-1] == scores[_SEEDS.index(_SEEDS[-1])]
    assert scores[-1] != scores[0]


async def test_vllm_resumes_shares_and_recomputes_prompts_with_their_images() -> None:
    config = wide_config("qwen2_5_vl")
    old, new = (model_of(config, seed) for seed in (0, 1))
    prompt, given = random_prompt(random.Random(1), 2)
    prompt += [5] * 64  # several blocks of the cache
    other = ModelInputs.from_values(
        {**given.tensors, "pixel_values": given.tensors["pixel_values"].flip(0)}
    )
    async with serving(config) as engine:
        await adopt(engine, 0, old)
        first = await engine.generate(request("first", prompt, given))
        # The policy sampled placeholders, which are tokens like any other.
        sampled = [*first.token_ids[:6], IMAGE, IMAGE]
        resumed = await engine.generate(
            request("resumed", [*prompt, *sampled], given, draw_offset=8)
        )
        wanted = expected(old, prompt, [*sampled, *resumed.token_ids], given)
        assert far(resumed.logprobs, wanted[8:]) <= 1e-5
        cached = engine.stats().cached_tokens_total
        assert cached > 0
        different = await engine.generate(request("other", prompt, other))
        assert engine.stats().cached_tokens_total - cached < len(prompt) // 2
        wanted = expected(old, prompt, different.token_ids, other)
        assert far(different.logprobs, wanted) <= 1e-5
        with pytest.raises(ValueError, match="image_token_id"):
            await engine.generate(request("shifted", [5, *prompt], given))

        seen: list[int] = []
        running = asyncio.create_task(
            engine.generate(
                request(
                    "long", prompt, given, max_tokens=120, on_tokens=lambda new, _: seen.extend(new)
                )
            )
        )
        await until(lambda: len(seen) >= 16)
        await adopt(engine, 1, new)
        result = await running
    (_, before), (version, after) = result.version_runs
    assert (version, before + after) == (1, 120)
    both = [expected(model, prompt, result.token_ids, given) for model in (old, new)]
    assert far(result.logprobs, torch.cat([both[0][:before], both[1][before:]])) <= 1e-5


@pytest.mark.parametrize(
    "kind", [pytest.param("qwen2_5_vl", marks=pytest.mark.nightly), "qwen3_vl"]
)
async def test_vllm_sees_images_of_later_turns(kind: str) -> None:
    model, rng = model_of(wide_config(kind), 0), random.Random(2)
    prompt, given = random_prompt(rng, 1)
    prompt += [5] * 48  # several blocks of the cache
    async with serving(wide_config(kind)) as engine:
        await adopt(engine, 0, model)
        first = await engine.generate(request("first", prompt, given))
        said = [*prompt, *first.token_ids]
        seen, inputs = random_prompt(rng, 2, num_tokens=len(said), num_earlier=1)
        pixels = inputs.tensors["pixel_values"]
        other = ModelInputs.from_values({**inputs.tensors, "pixel_values": pixels.flip(0)})
        reused = []
        for name, own in (("second", inputs), ("again", inputs), ("other", other)):
            before = engine.stats().cached_tokens_total
            whole = ModelInputs.joined([given, own])
            answer = await engine.generate(request(name, [*said, *seen, 5], whole))
            reused.append(engine.stats().cached_tokens_total - before)
            response = [*first.token_ids, *seen, 5, *answer.token_ids]
            wanted = expected(model, prompt, response, whole)
            assert far(answer.logprobs, wanted[-len(answer.token_ids) :]) <= 1e-5
    assert 0 < reused[0] <= len(said), "the first turn is computed once"
    assert reused[2] <= len(said) + 16, "an image that differs is not shared"
    assert reused[1] >= reused[2]


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["shadow", "inplace"])
def test_vllm_learns_which_square_is_red(tmp_path: Path, mode: str) -> None:
    settings = ("rollout.engine=vllm", f"weight_sync.mode={mode}")
    finished = train(REPOSITORY / "examples" / "images.yaml", tmp_path, *settings, timeout=800)
    assert finished.code == 0, finished.out[-2000:] + finished.err[-4000:]
    assert finished.summary["heldout"]["greedy"] >= 0.9
    assert finished.summary["prompts"]["quarantined"] == 0
