"""Images in external engines: logprobs after every update equal the trainer's; caches distinguish images."""

import asyncio
import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from services.wire.data.model_inputs import ModelInputs
from tests.helpers.cli import REPOSITORY, train
from tests.helpers.engine_images import (
    adopt,
    crossing_difference,
    expected,
    far,
    flipped,
    model_of,
    request,
    resumed_difference,
    serving,
)
from tests.helpers.vision import KINDS, random_prompt, wide_config

pytestmark = pytest.mark.timeout(900)
_PATCH = 14  # the only size that SGLang's Qwen2.5-VL takes
# Created before SGLang is imported, because the import changes defaults of transformers.
_CONFIGS = {
    (kind, spread): wide_config(kind, initializer_range=spread, patch=_PATCH)
    for kind in KINDS
    for spread in (0.1, 0.02)
}
_SEEDS = (0, 1, 2, 3, 1)
"""Seeds of the weights that are sent one after the other."""
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 5e-3}


def _case(engine: str, *others: Any, nightly: bool) -> Any:
    """Returns a pytest parameter that is skipped if its engine is not installed."""
    is_missing = importlib.util.find_spec(engine) is None
    marks = [pytest.mark.skipif(is_missing, reason=f"{engine} is not installed here")]
    if nightly:
        marks.append(pytest.mark.nightly)
    return pytest.param(engine, *others, marks=marks, id="-".join(map(str, (engine, *others))))


_ENGINES = [_case("vllm", nightly=False), _case("sglang", nightly=False)]


@pytest.mark.parametrize(
    ("engine_name", "kind", "dtype", "in_place"),
    [
        _case(engine, kind, dtype, in_place, nightly=not in_place)
        for engine in ("vllm", "sglang")
        for kind, dtype, in_place in (
            ("qwen2_5_vl", torch.float32, True),
            ("qwen2_5_vl", torch.float32, False),
            ("qwen2_5_vl", torch.bfloat16, False),
            ("qwen3_vl", torch.float32, False),
            ("qwen3_vl", torch.bfloat16, False),
        )
    ],
)
async def test_logprobs_are_those_of_the_trainer_after_every_adoption(
    engine_name: str, kind: str, dtype: torch.dtype, in_place: bool
) -> None:
    is_exact = dtype == torch.float32
    config = _CONFIGS[kind, 0.1 if is_exact else 0.02]
    rng = random.Random(0)
    prompts = [random_prompt(rng, count, patch=_PATCH) for count in (1, 2, 0, 3)]
    scores = []
    async with serving(engine_name, config, dtype, in_place=in_place) as engine:
        for version, seed in enumerate(_SEEDS):
            model = model_of(config, seed, dtype)
            await adopt(engine, version, model)
            generations = [
                engine.generate(request(f"{version}.{number}", *prompt, seed=number))
                for number, prompt in enumerate(prompts)
            ]
            for (prompt, inputs), result in zip(
                prompts, await asyncio.gather(*generations), strict=True
            ):
                logprobs = expected(model, prompt, result.token_ids, inputs)
                assert far(result.logprobs, logprobs) <= _TOLERANCES[dtype]
            scores.append([await engine.score(*prompt) for prompt in prompts])
            logprobs = expected(model, prompts[3][0][:1], prompts[3][0][1:], prompts[3][1])
            assert far(scores[-1][3], logprobs) <= _TOLERANCES[dtype]
    # The same weights give the same scores bit for bit, although others were served in between.
    assert scores[-1] == scores[_SEEDS.index(_SEEDS[-1])]
    assert scores[-1] != scores[0]


@pytest.mark.parametrize("engine_name", _ENGINES)
async def test_an_engine_resumes_shares_and_recomputes_prompts_with_their_images(
    engine_name: str,
) -> None:
    config = _CONFIGS["qwen2_5_vl", 0.1]
    old, new = (model_of(config, seed) for seed in (0, 1))
    prompt, inputs = random_prompt(random.Random(1), 2, patch=_PATCH)
    prompt += [5] * 64  # several blocks of the cache
    other = flipped(inputs)
    async with serving(engine_name, config) as engine:
        await adopt(engine, 0, old)
        assert await resumed_difference(engine, old, prompt, inputs) <= 1e-5
        cached = engine.stats().cached_tokens_total
        assert cached > 0
        different = await engine.generate(request("other", prompt, other))
        assert engine.stats().cached_tokens_total - cached < len(prompt) // 2
        logprobs = expected(old, prompt, different.token_ids, other)
        assert far(different.logprobs, logprobs) <= 1e-5
        with pytest.raises(ValueError, match="image_token_id"):
            await engine.generate(request("shifted", [5, *prompt], inputs))
        assert await crossing_difference(engine, old, new, prompt, inputs) <= 1e-5


@pytest.mark.parametrize(
    ("engine_name", "kind"),
    [
        _case(engine, kind, nightly=kind == "qwen2_5_vl")
        for engine in ("vllm", "sglang")
        for kind in ("qwen2_5_vl", "qwen3_vl")
    ],
)
async def test_an_engine_sees_images_of_later_turns(engine_name: str, kind: str) -> None:
    model, rng = model_of(_CONFIGS[kind, 0.1], 0), random.Random(2)
    prompt, prompt_inputs = random_prompt(rng, 1, patch=_PATCH)
    prompt += [5] * 48  # several blocks of the cache
    async with serving(engine_name, _CONFIGS[kind, 0.1]) as engine:
        await adopt(engine, 0, model)
        first = await engine.generate(request("first", prompt, prompt_inputs))
        said = [*prompt, *first.token_ids]
        observed, inputs = random_prompt(rng, 2, num_tokens=len(said), num_earlier=1, patch=_PATCH)
        other = flipped(inputs)
        reused = []
        for name, turn_inputs in (("second", inputs), ("again", inputs), ("other", other)):
            before = engine.stats().cached_tokens_total
            whole = ModelInputs.concat([prompt_inputs, turn_inputs])
            answer = await engine.generate(request(name, [*said, *observed, 5], whole))
            reused.append(engine.stats().cached_tokens_total - before)
            response = [*first.token_ids, *observed, 5, *answer.token_ids]
            logprobs = expected(model, prompt, response, whole)
            assert far(answer.logprobs, logprobs[-len(answer.token_ids) :]) <= 1e-5
    assert 0 < reused[0] <= len(said), "the first turn is computed once"
    assert reused[2] <= len(said) + 16, "an image that differs is not shared"
    assert reused[1] >= reused[2]


@pytest.mark.parametrize(
    ("engine_name", "mode"),
    # Without SGLang, whose Qwen2.5-VL does not take patches as small as the example's.
    [_case("vllm", mode, nightly=True) for mode in ("shadow", "inplace")],
)
def test_a_model_learns_which_square_is_red(tmp_path: Path, engine_name: str, mode: str) -> None:
    settings = (f"rollout.engine={engine_name}", f"weight_sync.mode={mode}")
    result = train(REPOSITORY / "examples" / "images.yaml", tmp_path, *settings, timeout=800)
    assert result.code == 0, result.out[-2000:] + result.err[-4000:]
    assert result.summary["heldout"]["greedy"] >= 0.9
    assert result.summary["prompts"]["quarantined"] == 0
