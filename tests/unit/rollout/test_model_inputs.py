"""Model inputs of prompts from a row to an engine."""

import asyncio
from typing import Any

import pytest
import torch

from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.data import DataSpec
from services.common.runspec.run import ModelSpec
from services.rollout.data.prompts import PromptStore
from services.rollout.data.sources import open_source
from services.rollout.engines.base import EngineCapabilities, check_supported
from services.rollout.engines.torch.engine import TorchEngine
from services.rollout.failures import GroupError
from tests.helpers.engines import make_engine, request, running
from tests.helpers.features import PLACEHOLDER, feature_model, features, plain_logprobs

PROMPT = (5, PLACEHOLDER, 6, PLACEHOLDER, 7)


def store(rows: list[Any], **changes: Any) -> PromptStore:
    values = {"train": {"source": "jsonl", "path": "rows"}, "model_inputs_column": "seen"}
    data = DataSpec(**{**values, **changes})  # type: ignore[arg-type]  # pydantic converts
    model = ModelSpec(path="tiny:qwen2-0.4m", tokenizer="chars:0123456789=")
    return PromptStore(data, {"train": rows}, load_tokenizer(model))


def test_a_rows_tensors_become_the_prompts_inputs_and_its_reward_sees_the_rest() -> None:
    tensor = torch.randn(2, 3).half()
    rows = [{"prompt": "1=", "answer": "1", "seen": {"a": tensor}}, {"prompt": "2=", "answer": "2"}]
    first, second = (store(rows).prompt("train", index) for index in (0, 1))
    assert first.model_inputs is not None
    assert torch.equal(first.model_inputs.tensors["a"], tensor)
    assert first.row == {"prompt": "1=", "answer": "1"}
    assert second.model_inputs is not None
    assert second.model_inputs.digest == ""
    assert store(rows, model_inputs_column=None).prompt("train", 0).model_inputs is None


def test_a_row_with_other_values_is_refused_alone() -> None:
    rows = [{"prompt": "1=", "answer": "1", "seen": {"a": "no tensor"}}]
    with pytest.raises(GroupError, match=r"'seen' in row 0 of data\.train") as caught:
        store(rows).prompt("train", 0)
    assert (caught.value.reason, caught.value.retryable) == ("prompt_malformed", False)


def test_a_column_that_no_row_has_is_refused(tmp_path: Any) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1=", "answer": "1", "pixels": {"a": [1]}}\n')
    data = DataSpec(train={"source": "jsonl", "path": str(file)}, model_inputs_column="pixel")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"data\.model_inputs_column.*'pixels'"):
        open_source(data.train, data, key="data.train")  # type: ignore[arg-type]


async def test_the_torch_engine_decodes_with_the_inputs_of_each_request() -> None:
    model = feature_model()
    engine, bundles = TorchEngine(model, max_running=8), [features(seed, 2) for seed in (1, 2, 1)]
    async with running(engine):
        results = await asyncio.gather(
            *[
                engine.generate(request(f"r{i}", PROMPT, max_tokens=6, seed=4, model_inputs=bundle))
                for i, bundle in enumerate(bundles)
            ]
        )
        scores = await engine.score([*PROMPT, *results[0].token_ids], bundles[0])
    assert results[0].token_ids == results[2].token_ids
    assert results[0].token_ids != results[1].token_ids
    assert engine.stats().cached_tokens_total == len(PROMPT) - 1, "equal inputs share their prompt"
    for bundle, result in zip(bundles, results, strict=True):
        expected = plain_logprobs(feature_model(), PROMPT, result.token_ids, bundle)
        torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        torch.tensor(scores[len(PROMPT) - 1 :]),
        torch.tensor(results[0].logprobs),
        atol=1e-5,
        rtol=1e-5,
    )


async def test_a_response_continues_under_new_weights_with_its_inputs() -> None:
    engine, inputs = TorchEngine(feature_model(0), max_running=2), features(1, 2)
    new = feature_model(1)
    weights = {name: value.detach().clone() for name, value in new.named_parameters()}
    async with running(engine):
        await engine.adopt_weights(1, weights)
        first = await engine.generate(
            request("a", PROMPT, seed=4, max_tokens=3, model_inputs=inputs)
        )
        rest = await engine.generate(
            request(
                "b",
                PROMPT + first.token_ids,
                seed=4,
                max_tokens=3,
                draw_offset=3,
                model_inputs=inputs,
            )
        )
    tokens = first.token_ids + rest.token_ids
    expected = plain_logprobs(new, PROMPT, tokens, inputs)
    torch.testing.assert_close(
        torch.tensor(first.logprobs + rest.logprobs), expected, atol=1e-5, rtol=1e-5
    )


async def test_inputs_that_the_model_refuses_fail_their_request_alone() -> None:
    engine = TorchEngine(feature_model(), max_running=8)
    async with running(engine):
        good = engine.generate(request("good", PROMPT, model_inputs=features(1, 2)))
        bad = engine.generate(request("bad", PROMPT, model_inputs=features(1, 5)))
        plain = engine.generate(request("plain", (5, 6)))
        results = await asyncio.gather(good, bad, plain, return_exceptions=True)
        alone = engine.generate(request("alone", PROMPT, model_inputs=features(1, 5)))
        with pytest.raises(ValueError, match="5 features for 2 placeholders"):
            await alone
        again = await engine.generate(request("again", PROMPT, model_inputs=features(1, 2)))
    assert isinstance(results[1], ValueError)
    assert not isinstance(results[0], BaseException)
    assert not isinstance(results[2], BaseException)
    assert again.token_ids == results[0].token_ids


async def test_a_model_or_an_engine_without_such_inputs_refuses_them() -> None:
    engine = make_engine()
    async with running(engine):
        with pytest.raises(ValueError, match="no input named features"):
            await engine.generate(request("a", PROMPT, model_inputs=features(1, 2)))
        with pytest.raises(ValueError, match="one token"):
            engine_with_inputs = TorchEngine(feature_model(), max_running=1)
            await engine_with_inputs.generate(
                request("b", (PLACEHOLDER,), model_inputs=features(1, 1))
            )
    can = EngineCapabilities(
        name="other", kv_policies=frozenset(), stop_texts=True, truncation=True, seeds=True
    )
    with pytest.raises(ValueError, match="'other' takes token ids only"):
        check_supported(request("c", PROMPT, model_inputs=features(1, 2)), can)
