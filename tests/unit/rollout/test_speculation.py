"""Speculative decoding: proposals, exactness of the torch engine, and the switch that disables proposals."""

import asyncio
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from services.common.models.loading import build_model
from services.common.runspec.loader import SpecError
from services.common.runspec.rollout import SpeculationSpec
from services.rollout.engines.base import GenerationResult
from services.rollout.engines.speculation import SpeculationSwitch, num_equal, propose_ngram
from services.rollout.engines.torch.engine import TorchEngine
from tests.helpers.engines import (
    make_engine,
    make_model,
    reference_logprobs,
    request,
    running,
    until,
    weights_of,
)
from tests.helpers.mixtures import tiny_config
from tests.helpers.specs import spec_with

SPECULATION = SpeculationSpec(tokens=3, prompt_lookup_min=1, prompt_lookup_max=3)
CONTEXTS = [(1, 2, 3, 4) * 3 + tuple(range(1, 2 + index % 5)) for index in range(12)]


@pytest.fixture
def always_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enables proposals in every step, regardless of the measured times."""
    monkeypatch.setattr(SpeculationSwitch, "is_on", lambda *_: True)


async def generate_all(engine: TorchEngine, **changes: object) -> list[GenerationResult]:
    requests = [
        request(f"r{index}", context, **{"seed": index, "max_tokens": 30} | changes)
        for index, context in enumerate(CONTEXTS)
    ]
    return await asyncio.gather(
        *[engine.generate(generation_request) for generation_request in requests]
    )


async def both(**changes: object) -> tuple[list[GenerationResult], list[GenerationResult], float]:
    """Returns results without and with proposals, and the fraction of accepted tokens."""
    plain, drafting = make_engine(), make_engine(speculation=SPECULATION)
    async with running(plain), running(drafting):
        expected, drafted = (
            await generate_all(plain, **changes),
            await generate_all(drafting, **changes),
        )
    drafts = drafting.stats().drafts
    assert drafting.stats().tokens_total == sum(len(result.token_ids) for result in drafted)
    return expected, drafted, drafts.num_accepted / drafts.num_tokens


def propose(tokens: list[int], limit: int = 4, shortest: int = 1, longest: int = 3) -> list[int]:
    return propose_ngram(np.array(tokens), limit=limit, shortest=shortest, longest=longest)


def test_a_proposal_follows_the_latest_of_the_longest_occurrences() -> None:
    assert propose([7, 1, 2, 3, 9, 2, 3, 8, 5, 1, 2, 3], limit=2) == [9, 2]
    assert propose([1, 2, 5, 1, 2, 6, 1, 2], limit=2) == [6, 1]
    assert propose([1, 2, 3, 4]) == propose([1]) == propose([1, 1], limit=0) == []


def test_a_proposal_that_overlaps_the_end_repeats_itself() -> None:
    assert propose([5, 1, 2, 1, 2], limit=5) == [1, 2, 1, 2, 1]
    assert propose([4, 4], limit=3) == [4, 4, 4]


def test_short_occurrences_propose_nothing() -> None:
    assert propose([1, 2, 9, 5, 2], shortest=2) == []
    assert propose([1, 2, 9, 1, 2], shortest=2, limit=1) == [9]


def test_tokens_are_equal_up_to_the_first_difference() -> None:
    assert [num_equal([1, 2], drawn) for drawn in ([1, 2, 3], [1, 3, 2], [2, 2, 2])] == [2, 1, 0]


@pytest.mark.usefixtures("always_on")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.6},
        {"top_p": 0.8},
        {"top_k": 5, "min_p": 0.05},
        {"top_k": 6, "returns_mask": True},
        {"stop_token_ids": frozenset({3, 5})},
    ],
    ids=str,
)
async def test_proposals_change_no_token_and_no_logprob(changes: dict[str, object]) -> None:
    expected, drafted, accepted = await both(**changes)
    assert accepted > 0
    for plain_result, drafted_result in zip(expected, drafted, strict=True):
        assert replace(drafted_result, logprobs=()) == replace(plain_result, logprobs=())
        assert np.allclose(plain_result.logprobs, drafted_result.logprobs, atol=1e-5)
        if plain_result.sampling_mask is not None:
            assert np.array_equal(plain_result.sampling_mask, drafted_result.sampling_mask)


@pytest.mark.usefixtures("always_on")
async def test_a_response_ends_with_its_stop_text() -> None:
    def decode(ids: object) -> str:
        return "".join(chr(ord("a") + token) for token in ids)  # type: ignore[attr-defined]

    plain, drafting = (
        make_engine(decode=decode),
        make_engine(decode=decode, speculation=SPECULATION),
    )
    async with running(plain), running(drafting):
        text = decode((await plain.generate(request("r", CONTEXTS[0], max_tokens=30))).token_ids)
        stop_request = request("stopped", CONTEXTS[0], max_tokens=30, stop_texts=(text[8:10],))
        assert (await drafting.generate(stop_request)).token_ids == (
            await plain.generate(stop_request)
        ).token_ids


@pytest.mark.usefixtures("always_on")
@pytest.mark.parametrize("kv_policy", ["recompute", "keep"])
async def test_each_token_has_the_version_that_drew_it(kv_policy: str) -> None:
    engine = make_engine(max_running=4, speculation=SPECULATION, kv_policy=kv_policy)
    await engine.adopt_weights(0, weights_of(0))
    async with running(engine):
        working = asyncio.ensure_future(generate_all(engine, max_tokens=60))
        version = 0
        while not working.done():
            version += 1
            before = engine.stats().tokens_total
            await engine.adopt_weights(version, weights_of(version))
            await until(
                lambda: engine.stats().tokens_total >= before + 40 or working.done()  # noqa: B023
            )
        results = await working
    assert sum(len(result.version_runs) > 1 for result in results) > len(CONTEXTS) // 2
    for context, result in zip(CONTEXTS, results, strict=True):
        assert all(before < after for (before, _), (after, _) in pairwise(result.version_runs))
        assert sum(count for _, count in result.version_runs) == len(result.token_ids) == 60
        start = 0
        for run_version, count in result.version_runs if kv_policy == "recompute" else ():
            tokens = result.token_ids[start : start + count]
            expected = reference_logprobs(run_version, context + result.token_ids[:start], tokens)
            assert np.allclose(result.logprobs[start : start + count], expected, atol=1e-5)
            start += count


@pytest.mark.usefixtures("always_on")
async def test_a_resumed_response_continues_its_random_stream() -> None:
    plain, drafting = make_engine(), make_engine(speculation=SPECULATION)
    async with running(plain), running(drafting):
        whole = await plain.generate(request("whole", CONTEXTS[0], max_tokens=40))
        head = await drafting.generate(request("head", CONTEXTS[0], max_tokens=13))
        context = CONTEXTS[0] + head.token_ids
        tail = await drafting.generate(request("tail", context, max_tokens=27, draw_offset=13))
    assert head.token_ids + tail.token_ids == whole.token_ids


@pytest.mark.usefixtures("always_on")
async def test_responses_use_all_of_a_full_cache() -> None:
    engine = make_engine(max_running=3, max_kv_tokens=48, speculation=SPECULATION)
    async with running(engine):
        results = await generate_all(engine)
        last = await engine.generate(
            request("whole", CONTEXTS[0], max_tokens=48 - len(CONTEXTS[0]))
        )
    assert {len(result.token_ids) for result in results} == {30}
    expected = reference_logprobs(0, CONTEXTS[0], last.token_ids)
    assert np.allclose(last.logprobs, expected, atol=1e-5)


@pytest.mark.usefixtures("always_on")
def test_batch_invariant_responses_keep_every_bit() -> None:
    result_lists = []
    for speculation in (None, SPECULATION):
        model = make_model(0)
        engine = TorchEngine(model, max_running=8, is_invariant=True, speculation=speculation)
        batch = engine._batch
        batch.admit(
            [
                request(f"r{i}", context, seed=i, max_tokens=40)
                for i, context in enumerate(CONTEXTS[:7])
            ]
        )
        results: dict[str, GenerationResult] = {}
        while len(batch):
            results |= dict(batch.step(0))
        result_lists.append(results)
        assert speculation is None or engine.stats().drafts.num_accepted > 0
    assert result_lists[0] == result_lists[1]


@pytest.mark.usefixtures("always_on")
async def test_experts_of_rejected_proposals_are_not_reported() -> None:
    config = tiny_config("glm4_moe", vocab_size=24, num_hidden_layers=3)
    result_lists = []
    for speculation in (None, SPECULATION):
        model = build_model(config, dtype=torch.float32, device="cpu", seed=0)
        engine = TorchEngine(model, max_running=4, returns_experts=True, speculation=speculation)
        async with running(engine):
            result_lists.append(await generate_all(engine))
    for plain_result, drafted_result in zip(*result_lists, strict=True):
        assert plain_result.token_ids == drafted_result.token_ids
        assert np.array_equal(plain_result.routed_experts, drafted_result.routed_experts)


def test_models_with_recurrent_layers_are_refused() -> None:
    model = build_model(tiny_config("qwen3_next"), dtype=torch.float32, device="cpu", seed=0)
    with pytest.raises(ValueError, match=r"rollout\.speculation"):
        TorchEngine(model, max_running=4, speculation=SPECULATION)


def decided(
    switch: SpeculationSwitch, running: int, *, gain: float, cost: float, steps: int
) -> int:
    """Returns the number of steps with proposals, if such a step takes ``cost`` times as long as others."""
    used = 0
    for _ in range(steps):
        is_on = switch.is_on(running)
        used += is_on
        switch.record(
            running,
            num_tokens=round(running * gain) if is_on else running,
            has_drafts=is_on,
            seconds=cost if is_on else 1.0,
        )
    return used


def test_proposals_are_used_where_they_pay() -> None:
    switch = SpeculationSwitch()
    assert decided(switch, 8, gain=2.0, cost=1.5, steps=640) > 600
    assert decided(switch, 128, gain=2.0, cost=3.0, steps=640) < 40
    assert decided(switch, 8, gain=1.0, cost=1.5, steps=640) < 100
    assert decided(switch, 128, gain=4.0, cost=3.0, steps=1280) > 640


def test_keys_name_an_engine_that_can_use_them() -> None:
    for engine, speculation in [
        ("torch", {}),
        ("torch", {"tokens": 16, "prompt_lookup_min": 3}),
        ("vllm", {}),
        ("vllm", {"method": "suffix"}),
        ("vllm", {"method": "mtp"}),
        ("vllm", {"method": "eagle", "model": "someone/head"}),
    ]:
        spec = spec_with(rollout={"engine": engine, "speculation": speculation})
        assert spec.rollout.speculation == SpeculationSpec(**speculation)


@pytest.mark.parametrize(
    ("rollout", "word"),
    [
        ({"speculation": {"method": "suffix"}}, "method"),
        ({"engine": "sglang", "speculation": {}}, "sglang"),
        ({"engine": "fake", "speculation": {}}, "fake"),
        ({"speculation": {"prompt_lookup_min": 6}}, "prompt_lookup_min"),
        ({"speculation": {"tokens": 0}}, "tokens"),
        ({"speculation": {"model": "someone/head"}}, "model"),
        ({"engine": "vllm", "speculation": {"method": "eagle"}}, "model"),
        ({"engine": "vllm", "speculation": {}, "reproducible": True}, "reproducible"),
        ({"engine": "vllm", "speculation": {}, "routing_replay": "compare"}, "routing_replay"),
        ({"engine": "vllm", "engine_arguments": {"speculative_config": {}}}, "rollout.speculation"),
    ],
    ids=str,
)
def test_keys_that_an_engine_cannot_use_are_refused(rollout: dict[str, object], word: str) -> None:
    with pytest.raises(SpecError, match=word):
        spec_with(rollout=rollout)


def test_heads_are_refused_where_the_trainer_takes_the_gpu() -> None:
    rollout = {"engine": "vllm", "speculation": {"method": "mtp"}}
    with pytest.raises(SpecError, match=r"topology\.placement"):
        spec_with(rollout=rollout, topology={"placement": "colocated"})


@pytest.mark.usefixtures("always_on")
def test_tokens_after_proposals_have_the_policys_distribution() -> None:
    model, num_draws = make_model(0), 10_000
    context = (3, 9, 14, 3, 9, 20, 7, 3)
    with torch.no_grad():
        likeliest = int(model(torch.tensor([context])).logits[0, -1].argmax())
    # The likeliest token follows the first copy of the context, so it is proposed and sometimes accepted.
    context = (*context, likeliest, *context)
    engine = TorchEngine(model, max_running=num_draws, speculation=SPECULATION)
    batch, responses = engine._batch, []
    for start in range(0, num_draws, 1000):
        seeds = range(start, start + 1000)
        batch.admit([request(f"r{seed}", context, seed=seed, max_tokens=2) for seed in seeds])
        while len(batch):
            responses += [result.token_ids for _, result in batch.step(0)]
    drafts = engine.stats().drafts
    assert 0.02 < drafts.num_accepted / drafts.num_drafts < 0.98
    proposed = propose(list(context), limit=1)[0]
    with torch.no_grad():
        after = model(torch.tensor([(*context, proposed)])).logits[0, -2:]
    expected = torch.softmax(after, -1).numpy()
    second = [tokens[1] for tokens in responses if tokens[0] == proposed]
    for drawn, shares in ((([t[0] for t in responses]), expected[0]), (second, expected[1])):
        counts = np.bincount(drawn, minlength=len(shares))
        means = shares * len(drawn)
        is_frequent = means >= 5
        statistic = ((counts - means)[is_frequent] ** 2 / means[is_frequent]).sum()
        # Chi-square has its degrees of freedom as mean, and twice that as variance.
        freedom = is_frequent.sum() - 1
        assert statistic < freedom + 4 * (2 * freedom) ** 0.5
