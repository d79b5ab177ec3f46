"""Tests of the torch engine: exact logprobs, versions, seeds and interruption."""

import asyncio
import threading
from collections.abc import Mapping
from copy import deepcopy
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from services.common.models.families import FAMILIES
from services.common.models.loading import build_model, stored_tensors
from services.common.models.quantization import Fp8, fp8_rounded, is_fp8
from services.rollout.engines.base import GenerationResult
from services.rollout.engines.torch import decoding
from services.rollout.engines.torch.engine import TorchEngine
from services.rollout.weights import WeightReceiver
from tests.helpers.engines import (
    VOCAB_SIZE,
    begun,
    made,
    make_engine,
    make_model,
    reference_logprobs,
    request,
    running,
    until,
    weights_of,
)
from tests.helpers.mixtures import tiny_config

CONTEXTS = [tuple(range(1, 2 + index % 7)) for index in range(20)]
FEW_CONTEXTS = CONTEXTS[:10]  # exceeds the number of running requests, and has all lengths


async def generate_all(
    engine: TorchEngine, contexts: list[tuple[int, ...]] = CONTEXTS, **changes: object
) -> list[GenerationResult]:
    return await asyncio.gather(
        *[
            engine.generate(request(f"r{index}", context, seed=index, **changes))
            for index, context in enumerate(contexts)
        ]
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_a_plain_forward_pass(temperature: float) -> None:
    engine = make_engine()
    async with running(engine):
        results = await generate_all(engine, temperature=temperature)
    for context, result in zip(CONTEXTS, results, strict=True):
        expected = reference_logprobs(0, context, result.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        *((family, {}) for family in FAMILIES),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("qwen2_moe", {"moe_intermediate_size": 5}),
    ],
    ids=str,
)
async def test_decoding_equals_the_forward_pass_for_every_family(
    family: str, extra: dict[str, Any]
) -> None:
    window = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}
    config = tiny_config(family, **{"vocab_size": VOCAB_SIZE, **window, **extra})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    engine = TorchEngine(model, max_running=8)
    async with running(engine):
        results = await generate_all(engine, FEW_CONTEXTS)
    for context, result in zip(FEW_CONTEXTS, results, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([context + result.token_ids])).logits[0]
        logprobs = torch.log_softmax(logits[len(context) - 1 : -1], dim=-1)
        expected = logprobs.gather(1, torch.tensor(result.token_ids)[:, None]).squeeze(1)
        # Granite does not scale attention by the head size, which increases rounding errors.
        torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=1e-4, rtol=1e-5)


async def test_a_seed_draws_the_same_tokens_in_any_batch() -> None:
    engine = make_engine()
    async with running(engine):
        together = await generate_all(engine)
        alone = [
            await engine.generate(request("alone", context, seed=index))
            for index, context in enumerate(CONTEXTS)
        ]
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]
    assert len({result.token_ids for result in together}) > len(CONTEXTS) // 2


async def generate_together(
    engine: TorchEngine, contexts: list[tuple[int, ...]]
) -> list[GenerationResult]:
    """Returns the results of requests that are admitted in the same step."""
    await engine.pause()
    generations = [
        asyncio.ensure_future(engine.generate(request(f"r{i}", context, seed=i, max_tokens=40)))
        for i, context in enumerate(contexts)
    ]
    await until(lambda: engine.stats().num_waiting == len(generations))
    await engine.resume()
    return await asyncio.gather(*generations)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
async def test_samples_are_bit_identical_across_batches_of_one_shape(
    dtype: torch.dtype,
) -> None:
    def contexts(shift: int) -> list[tuple[int, ...]]:
        return [tuple((7 * i + p + shift) % VOCAB_SIZE for p in range(2 + i)) for i in range(8)]

    engine = TorchEngine(make_model(0).to(dtype), max_running=8)
    async with running(engine):
        first = await generate_together(engine, contexts(0))
        again = await generate_together(engine, contexts(0))
        beside = await generate_together(engine, [contexts(0)[0], *contexts(3)[1:]])
    assert again == first
    assert beside[0] == first[0]
    assert beside[1:] != first[1:]


async def test_greedy_takes_the_likeliest_token_and_reports_logprobs_at_temperature_one() -> None:
    engine = make_engine()
    async with running(engine):
        result = await engine.generate(request("greedy", (1, 2, 3), temperature=0.0))
    context = (1, 2, 3)
    for token in result.token_ids:
        with torch.no_grad():
            assert make_model(0)(torch.tensor([context])).logits[0, -1].argmax() == token
        context += (token,)
    expected = reference_logprobs(0, (1, 2, 3), result.token_ids)
    torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=1e-5, rtol=1e-5)


async def test_stop_token_ends_the_response_and_belongs_to_it() -> None:
    engine = make_engine()
    async with running(engine):
        free = await engine.generate(request("free", (1, 2), max_tokens=30))
        stop = free.token_ids[5]
        stopped = await engine.generate(
            request("stopped", (1, 2), max_tokens=30, stop_token_ids=frozenset({stop}))
        )
    end = free.token_ids.index(stop) + 1
    assert free.finish_reason == "length"
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[:end]


async def test_stop_text_ends_the_response_at_the_token_that_completes_it() -> None:
    def decode(ids: object) -> str:
        return "".join(chr(ord("a") + token) for token in ids)  # type: ignore[attr-defined]

    engine = make_engine(decode=decode)
    async with running(engine):
        free = await engine.generate(request("free", (1, 2), max_tokens=30))
        text = decode(free.token_ids[4:7])
        stopped = await engine.generate(
            request("stopped", (1, 2), max_tokens=30, stop_texts=(text,))
        )
    assert stopped.finish_reason == "stop"
    assert decode(stopped.token_ids).endswith(text)
    assert decode(stopped.token_ids).index(text) + len(text) == len(stopped.token_ids)


async def test_every_token_has_the_version_and_logprob_of_the_weights_that_sampled_it() -> None:
    engine = make_engine(max_running=4)
    await engine.adopt_weights(0, weights_of(0))
    async with running(engine):
        tasks = [
            asyncio.ensure_future(
                engine.generate(request(f"r{index}", context, seed=index, max_tokens=40))
            )
            for index, context in enumerate(CONTEXTS)
        ]
        version = 0
        while not all(task.done() for task in tasks):
            version += 1
            before = engine.stats().tokens_total
            await engine.adopt_weights(version, weights_of(version))
            await until(
                lambda: (
                    engine.stats().tokens_total >= before + 30  # noqa: B023 -- used at once
                    or all(task.done() for task in tasks)
                )
            )
        results = [task.result() for task in tasks]
    mixed = 0
    for context, result in zip(CONTEXTS, results, strict=True):
        assert sum(count for _, count in result.version_runs) == len(result.token_ids) == 40
        assert all(before < after for (before, _), (after, _) in pairwise(result.version_runs))
        mixed += len(result.version_runs) > 1
        start = 0
        for run_version, count in result.version_runs:
            tokens = result.token_ids[start : start + count]
            expected = reference_logprobs(run_version, context + result.token_ids[:start], tokens)
            logprobs = torch.tensor(result.logprobs[start : start + count])
            torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
            start += count
    assert mixed > len(CONTEXTS) // 2


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1"])
async def test_recurrent_states_are_those_of_the_live_weights_and_of_resumed_responses(
    family: str,
) -> None:
    # A larger initializer_range amplifies the rounding of a plain forward pass beyond the tolerance.
    config = tiny_config(family, vocab_size=VOCAB_SIZE, initializer_range=0.1)
    models = [
        build_model(config, dtype=torch.float32, device="cpu", seed=seed) for seed in range(2)
    ]
    engine = TorchEngine(deepcopy(models[0]), max_running=4)
    await engine.adopt_weights(0, stored_tensors(models[0]))
    contexts = CONTEXTS[:8]
    async with running(engine):
        tasks = begun(engine, contexts, max_tokens=40)
        await until(made(engine, 60))
        await engine.adopt_weights(1, stored_tensors(models[1]))
        results = await asyncio.gather(*tasks)
        head = await engine.generate(request("head", contexts[3], max_tokens=15))
        whole = await engine.generate(request("whole", contexts[3], max_tokens=30))
        tail = await engine.generate(
            request("tail", contexts[3] + head.token_ids, max_tokens=15, draw_offset=15)
        )
    assert any(len(result.version_runs) == 2 for result in results)
    for context, result in zip(contexts, results, strict=True):
        ids = torch.tensor([context + result.token_ids])
        expected: list[Tensor] = []
        for version, count in result.version_runs:
            with torch.no_grad():
                logits = models[version](ids).logits[0, len(context) - 1 : -1]
            logprobs = torch.log_softmax(logits, -1).gather(1, ids[0, len(context) :, None])[:, 0]
            expected += logprobs[len(expected) : len(expected) + count]
        torch.testing.assert_close(
            torch.tensor(result.logprobs), torch.stack(expected), atol=1e-5, rtol=1e-5
        )
    assert whole.token_ids == head.token_ids + tail.token_ids
    assert whole.logprobs == pytest.approx(head.logprobs + tail.logprobs, abs=1e-5)


async def test_stale_kv_differs_from_recomputed_kv_after_an_update() -> None:
    worst = {}
    for policy in ("recompute", "keep"):
        engine = make_engine(kv_policy=policy)
        await engine.adopt_weights(0, weights_of(0))
        async with running(engine):
            task = asyncio.ensure_future(engine.generate(request("r", (1, 2, 3), max_tokens=60)))
            await until(lambda: engine.stats().tokens_total >= 10)  # noqa: B023 -- used at once
            await engine.adopt_weights(1, weights_of(1))
            result = await task
        start = result.version_runs[0][1]
        computed_again = engine.stats().recomputed_tokens_total
        assert computed_again == (start if policy == "recompute" else 0)
        expected = reference_logprobs(
            1, (1, 2, 3, *result.token_ids[:start]), result.token_ids[start:]
        )
        worst[policy] = float((torch.tensor(result.logprobs[start:]) - expected).abs().max())
    assert worst["recompute"] < 1e-5 < 1e-2 < worst["keep"]


async def test_an_aborted_sample_keeps_its_tokens_and_resumes_its_random_stream() -> None:
    first, second = make_engine(), make_engine()
    async with running(first), running(second):
        whole = await first.generate(request("whole", (1, 2, 3), max_tokens=60))
        task = asyncio.ensure_future(first.generate(request("cut", (1, 2, 3), max_tokens=60)))
        before = first.stats().tokens_total
        await until(lambda: first.stats().tokens_total >= before + 7)
        await first.abort({"cut"})
        head = await task
        tail = await second.generate(
            request(
                "resumed",
                (1, 2, 3, *head.token_ids),
                max_tokens=60 - len(head.token_ids),
                draw_offset=len(head.token_ids),
            )
        )
    assert head.finish_reason == "aborted"
    assert first.stats().recomputed_tokens_total == 0
    assert second.stats().recomputed_tokens_total == len(head.token_ids)
    assert 7 <= len(head.token_ids) < 60
    assert head.token_ids + tail.token_ids == whole.token_ids


async def test_pause_stops_all_tokens_and_resume_continues() -> None:
    engine = make_engine()
    async with running(engine):
        task = asyncio.ensure_future(engine.generate(request("r", (1, 2, 3), max_tokens=200)))
        await until(lambda: engine.stats().tokens_total >= 5)
        await engine.pause()
        frozen = engine.stats().tokens_total
        for _ in range(50):
            await asyncio.sleep(0)
        assert engine.stats().tokens_total == frozen < 200
        await engine.resume()
        assert len((await task).token_ids) == 200


async def test_draining_pause_finishes_running_requests_and_holds_new_ones() -> None:
    engine = make_engine()
    async with running(engine):
        task = asyncio.ensure_future(engine.generate(request("old", (1, 2, 3), max_tokens=50)))
        await until(lambda: engine.stats().num_running > 0)
        draining = asyncio.ensure_future(engine.pause(drain=True))
        await asyncio.sleep(0)
        late = asyncio.ensure_future(engine.generate(request("new", (1, 2), max_tokens=5)))
        await draining
        assert task.done()
        assert engine.stats().num_waiting == 1
        await engine.adopt_weights(3, weights_of(1))
        await engine.resume()
        assert (await late).version_runs == ((3, 5),)


async def test_a_cancelled_caller_frees_its_place() -> None:
    engine = make_engine(max_running=1)
    async with running(engine):
        task = asyncio.ensure_future(engine.generate(request("gone", (1,), max_tokens=500)))
        await until(lambda: engine.stats().num_running > 0)
        task.cancel()
        await engine.generate(request("next", (1,), max_tokens=2))
        assert engine.stats().num_running == 0


async def test_bad_requests_are_rejected_alone() -> None:
    engine = make_engine()
    async with running(engine):
        good = asyncio.ensure_future(engine.generate(request("good", (1, 2))))
        for context, changes in [
            ((), {}),
            ((1, VOCAB_SIZE), {}),
            ((1,) * 510, {}),
            ((1,), {"max_tokens": 0}),
            ((1,), {"stop_texts": ("x",)}),
        ]:
            with pytest.raises(ValueError, match=r"token|context|stop"):
                await engine.generate(request("bad", context, **changes))
        assert len((await good).token_ids) == 8


async def test_weights_that_do_not_fit_change_nothing() -> None:
    engine = make_engine()
    await engine.adopt_weights(0, weights_of(0))
    bad = weights_of(1)
    name = next(iter(bad))
    for wrong in (
        {key: value for key, value in bad.items() if key != name},
        bad | {"surprise": bad[name]},
        bad | {name: bad[name][:-1]},
    ):
        with pytest.raises(ValueError, match="same model"):
            await engine.adopt_weights(1, wrong)
    assert engine.stats().weight_version == 0
    async with running(engine):
        result = await engine.generate(request("r", (1, 2, 3)))
    expected = reference_logprobs(0, (1, 2, 3), result.token_ids)
    torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=1e-5, rtol=1e-5)


async def test_kv_limit_holds_requests_back_and_loses_none() -> None:
    engine = make_engine(max_running=8, max_kv_tokens=40)
    async with running(engine):
        results = await generate_all(engine)
    assert [len(result.token_ids) for result in results] == [8] * len(CONTEXTS)


async def test_rounding_up_batches_and_spans_changes_nothing(monkeypatch) -> None:
    """The test pads a batch as CUDA graphs do, with rows and slots that have no request."""
    contexts = [tuple(range(1, 2 + n)) for n in range(5)]

    async def decode(is_rounded: bool) -> list[GenerationResult]:
        engine = make_engine(3)
        step = engine._batch._step
        monkeypatch.setattr(step, "_is_cuda", is_rounded)
        monkeypatch.setattr(step, "_graph", lambda *_: None)
        async with running(engine):
            return await asyncio.gather(
                *[
                    engine.generate(
                        request(str(i), context, seed=i, max_tokens=40 + 5 * i, top_k=i % 2 * 5)
                    )
                    for i, context in enumerate(contexts)
                ]
            )

    for exact, rounded in zip(await decode(False), await decode(True), strict=True):
        assert exact.token_ids == rounded.token_ids
        assert exact.logprobs == pytest.approx(rounded.logprobs, abs=1e-5)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_5_text", "falcon_h1"])
@pytest.mark.parametrize("most", [14, 21])
async def test_contexts_that_are_stored_in_parts_give_the_same_tokens(
    monkeypatch, family: str, most: int
) -> None:
    model = build_model(
        tiny_config(family, vocab_size=VOCAB_SIZE), dtype=torch.float32, device="cpu", seed=0
    )
    async with running(engine := TorchEngine(model, max_running=8)):
        whole = await generate_all(engine)
    # The mask allows two or three queries of the longest context at a time, and fewer of several contexts.
    monkeypatch.setattr(decoding, "_MAX_MASK", most)
    async with running(engine := TorchEngine(model, max_running=8)):
        parts = await generate_all(engine)
    for whole_result, result_of_parts in zip(whole, parts, strict=True):
        assert whole_result.token_ids == result_of_parts.token_ids
        assert whole_result.logprobs == pytest.approx(result_of_parts.logprobs, abs=1e-5)


async def test_experts_are_rounded_and_routers_are_not() -> None:
    config = tiny_config("qwen3_moe")
    model = AutoModelForCausalLM.from_config(config)
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    engine = TorchEngine(model, max_running=2, quantization="fp8")
    await engine.adopt_weights(0, weights)
    changed = {
        name
        for name, value in engine._model.named_parameters()
        if not torch.equal(value, weights[name])
    }
    assert any(".experts." in name for name in changed)
    assert not any(name.endswith(".gate.weight") for name in changed)
    async with running(engine):
        (result,) = [await engine.generate(request("r", CONTEXTS[5]))]
    assert len(result.token_ids) == 8


@pytest.mark.parametrize(("kind", "exact"), [("fp8", 0), ("fp8", 1), ("fp8_block", 0)])
async def test_a_quantizing_engine_serves_the_rounded_weights_of_each_version(
    kind: Fp8, exact: int
) -> None:
    engine = TorchEngine(make_model(0), max_running=4, quantization=kind, unquantized_layers=exact)
    plain = TorchEngine(make_model(0), max_running=4)
    context = CONTEXTS[6]
    for version in range(3):
        weights = weights_of(version)
        before = {name: value.clone() for name, value in weights.items()}
        for quantizing_or_plain in (engine, plain):
            await quantizing_or_plain.adopt_weights(version, weights)
        assert all(torch.equal(weights[name], value) for name, value in before.items())
        rounded = {
            name: fp8_rounded(value, kind)
            if is_fp8(name, tuple(value.shape), num_exact=exact)
            else value
            for name, value in weights.items()
        }
        served = dict(engine._model.named_parameters())
        for name, value in rounded.items():
            assert torch.equal(served[name], value), name
        far = torch.tensor(await engine.score(context)) - torch.tensor(await plain.score(context))
        assert 0 < far.abs().mean() < 0.5


async def test_an_adoption_whose_caller_leaves_ends_before_the_next_token() -> None:
    engine = make_engine()
    await engine.adopt_weights(1, weights_of(1))
    adopted, copying, copied = asyncio.Event(), threading.Event(), threading.Event()
    receiver = WeightReceiver(on_adopted=adopted.set)
    receiver.attach(engine, SimpleNamespace(checkpoint_soon=int), is_partial=True)  # type: ignore[arg-type]
    copy = engine._copy_weights

    def slowly(tensors: Mapping[str, Tensor]) -> None:
        copying.set()
        copied.wait(10)
        copy(tensors)

    engine._copy_weights = slowly  # type: ignore[method-assign]
    async with running(engine):
        generating = asyncio.create_task(engine.generate(request("a", (1, 2), max_tokens=300)))
        await until(made(engine, 3))
        adopting = asyncio.create_task(receiver.adopt_weights(2, weights_of(2)))
        await until(copying.is_set)
        num_tokens = engine.stats().tokens_total
        adopting.cancel()  # as if the controller ended the session after the loss of another member
        await asyncio.sleep(0.2)
        assert engine.stats().tokens_total == num_tokens
        assert not adopted.is_set()
        copied.set()
        result = await generating
    with pytest.raises(asyncio.CancelledError):
        await adopting
    assert adopted.is_set()  # the previous weights are no longer served
    assert [version for version, _ in result.version_runs] == [1, 2]


async def test_one_thread_decodes_so_that_only_it_keeps_the_memory_of_steps(monkeypatch) -> None:
    engine = make_engine()
    threads = set[int]()
    for name in ("admit", "step", "recompute"):
        work = getattr(engine._batch, name)

        def noted(*values: Any, work: Any = work) -> Any:
            threads.add(threading.get_ident())
            return work(*values)

        monkeypatch.setattr(engine._batch, name, noted)
    async with running(engine):
        for version in range(1, 4):
            # Work of other parts of the process keeps threads of the event loop busy.
            await asyncio.gather(*(asyncio.to_thread(int) for _ in range(20)))
            await generate_all(engine, FEW_CONTEXTS)
            await engine.adopt_weights(version, weights_of(version))
    assert len(threads) == 1
    assert threading.get_ident() not in threads
