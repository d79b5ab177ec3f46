"""Contract of every engine on requests, run against each installed engine."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from services.rollout.engines.base import Engine, GenerationResult
from tests.contract.checks import PROMPT, TOLERANCE, adopt, assert_agrees, until
from tests.contract.engines import (
    ALL_ENGINES,
    REAL_ENGINES,
    SPECULATING_ENGINES,
    VOCAB_SIZE,
    OpenEngine,
    all_logprobs,
    decode,
    expected_logprobs,
)
from tests.helpers.engines import begun, made, request

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

_MAX_TRIES = 5

real_engines = pytest.mark.parametrize("open_engine", [*REAL_ENGINES, *SPECULATING_ENGINES])
all_engines = pytest.mark.parametrize("open_engine", [*ALL_ENGINES, *SPECULATING_ENGINES])


@all_engines
async def test_aborted_requests_keep_tokens_logprobs_and_versions(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        await adopt(engine, 5)
        tasks = begun(engine, [PROMPT[:9]] * 12, max_tokens=400)
        await until(made(engine, 40))
        running = await engine.peek()
        await engine.abort()
        results = [await task for task in tasks]
        assert engine.stats().num_running == engine.stats().num_waiting == 0
    assert {result.finish_reason for result in results} == {"aborted"}
    assert sum(len(result.token_ids) for result in results) >= 40
    for seed, result in enumerate(results):
        assert len(result.token_ids) == len(result.logprobs)
        assert [version for version, _ in result.version_runs] in ([5], [])
        peeked = running.get(f"r{seed}")
        if peeked is not None:
            assert result.token_ids[: len(peeked.token_ids)] == peeked.token_ids


@real_engines
async def test_an_aborted_request_resumes_with_agreeing_logprobs(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        await adopt(engine, 0)
        task = asyncio.ensure_future(engine.generate(request("cut", PROMPT, max_tokens=300)))
        await until(made(engine, 10))
        await engine.abort({"cut"})
        head = await task
        assert 10 <= len(head.token_ids) < 300
        assert_agrees(head, PROMPT)
        await adopt(engine, 1)
        context = PROMPT + head.token_ids
        tail = await engine.generate(
            request("more", context, max_tokens=20, draw_offset=len(head.token_ids))
        )
        assert_agrees(tail, context)


@all_engines
async def test_a_paused_engine_makes_no_token_and_loses_none(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        await adopt(engine, 0)
        task = asyncio.ensure_future(engine.generate(request("r", PROMPT[:9], max_tokens=200)))
        await until(made(engine, 5))
        await engine.pause()
        frozen = engine.stats().tokens_total
        late = asyncio.ensure_future(engine.generate(request("late", PROMPT[:4], max_tokens=3)))
        await asyncio.sleep(0.05)
        assert engine.stats().tokens_total == frozen
        assert not late.done()
        await engine.resume()
        assert len((await task).token_ids) == 200
        assert len((await late).token_ids) == 3


@all_engines
async def test_draining_finishes_running_requests_before_an_update(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        await adopt(engine, 0)
        old = asyncio.ensure_future(engine.generate(request("old", PROMPT[:9], max_tokens=60)))
        await until(made(engine, 1))
        draining = asyncio.ensure_future(engine.pause(drain=True))
        await asyncio.sleep(0)
        new = asyncio.ensure_future(engine.generate(request("new", PROMPT[:9], max_tokens=5)))
        await draining
        assert (await old).version_runs == ((0, 60),)
        await adopt(engine, 1)
        await engine.resume()
        assert (await new).version_runs == ((1, 5),)


@real_engines
async def test_seeds_stop_tokens_limits_and_greedy(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        await adopt(engine, 0)
        # An engine without seeds repeats only greedy responses.
        again: dict[str, Any] = {"seed": 7} if engine.capabilities.seeds else {"temperature": 0.0}
        first, second, other_seed = await asyncio.gather(
            engine.generate(request("a", PROMPT, max_tokens=30, **again)),
            engine.generate(request("b", PROMPT, max_tokens=30, **again)),
            engine.generate(request("c", PROMPT, max_tokens=30, seed=8)),
        )
        assert first.token_ids == second.token_ids != other_seed.token_ids
        assert first.finish_reason == "length"
        stop = first.token_ids[10]
        stopped = await engine.generate(
            request("d", PROMPT, max_tokens=30, stop_token_ids=frozenset({stop}), **again)
        )
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids == first.token_ids[: first.token_ids.index(stop) + 1]
        greedy = await engine.generate(request("e", PROMPT, temperature=0.0))
        assert_agrees(greedy, PROMPT)


@all_engines
async def test_scoring_runs_concurrently_with_requests(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        await adopt(engine, 0)
        running = asyncio.ensure_future(engine.generate(request("r", PROMPT[:9], max_tokens=100)))
        await until(made(engine, 5))
        assert len(await engine.score(PROMPT)) == len(PROMPT) - 1
        for ids in ((), (1,), (1, VOCAB_SIZE), (1,) * (1 << 21)):
            with pytest.raises(ValueError, match="token"):
                await engine.score(ids)
        assert len((await running).token_ids) == 100


@real_engines
async def test_streamed_tokens_equal_the_result(
    open_engine: OpenEngine,
) -> None:
    chunks: list[tuple[tuple[int, ...], tuple[float, ...]]] = []

    def listen(tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        chunks.append((tuple(tokens), tuple(logprobs)))

    async with open_engine() as engine:
        await adopt(engine, 0)
        generation_request = request("chunks", PROMPT, max_tokens=200, on_tokens=listen)
        running = asyncio.ensure_future(engine.generate(generation_request))
        await until(lambda: len(chunks) > 0)
        await adopt(engine, 1)
        result = await running
    assert tuple(token for tokens, _ in chunks for token in tokens) == result.token_ids
    assert tuple(value for _, logprobs in chunks for value in logprobs) == result.logprobs


@real_engines
async def test_a_temperature_is_part_of_the_logprobs(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        await adopt(engine, 0)
        result = await engine.generate(request("r", PROMPT, temperature=0.6, max_tokens=30))
        expected = expected_logprobs(0, PROMPT, result.token_ids, temperature=0.6)
        got = torch.tensor(result.logprobs)
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


@real_engines
async def test_truncated_sampling_has_whole_logprobs_or_is_refused(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        await adopt(engine, 0)
        for changes in ({"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.5}):
            generation = engine.generate(request("r", PROMPT, max_tokens=30, **changes))
            if not engine.capabilities.truncation:
                with pytest.raises(ValueError, match="whole distribution"):
                    await generation
                continue
            result = await generation
            assert_agrees(result, PROMPT)
            everything = all_logprobs(0, PROMPT, result.token_ids).exp()
            drawn = everything.gather(1, torch.tensor(result.token_ids)[:, None])
            likelier = torch.where(everything > drawn * (1 + 1e-4), everything, 0.0)
            assert int((likelier > 0).sum(1).max()) < (changes.get("top_k") or VOCAB_SIZE)
            assert float(likelier.sum(1).max()) < changes.get("top_p", 1.0) + 1e-4
            best = everything.max(1, keepdim=True).values
            assert bool((drawn >= changes.get("min_p", 0.0) * best - 1e-4).all())


@real_engines
async def test_sampling_masks_have_the_tokens_that_could_be_drawn(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        await adopt(engine, 0)
        whole = engine.generate(request("r", PROMPT, max_tokens=9, top_k=3, returns_mask=True))
        if not engine.capabilities.sampling_masks:
            with pytest.raises(ValueError):
                await whole
            return
        result, top_p_result, _ = await asyncio.gather(
            whole,
            engine.generate(
                request(
                    "p", PROMPT, max_tokens=9, top_k=9, top_p=0.5, returns_mask=True, top_logprobs=3
                )
            ),
            engine.generate(request("free", PROMPT, max_tokens=9)),
        )
        for sampled, top_k, top_p in ((result, 3, 1.0), (top_p_result, 9, 0.5)):
            everything = all_logprobs(0, PROMPT, sampled.token_ids)
            entries = sampled.sampling_mask.tolist()
            starts = [index for index, entry in enumerate(entries) if entry < 0]
            assert len(starts) == len(sampled.token_ids)
            for row, (start, end) in enumerate(
                zip(starts, [*starts[1:], len(entries)], strict=True)
            ):
                token_ids = [~entries[start], *entries[start + 1 : end]]
                ranked = everything[row].exp().sort(descending=True)
                before = ranked.values.cumsum(0) - ranked.values
                # top_p is relative to these tokens, but in SGLang to all.
                is_joint = engine.capabilities.name == "sglang"
                most = 1.0 if is_joint else ranked.values[:top_k].sum()
                size = min(top_k, int((before < top_p * most).sum()))
                assert sorted(token_ids) == sorted(ranked.indices[:size].tolist())
                relative = everything[row][token_ids].log_softmax(0)[
                    token_ids.index(sampled.token_ids[row])
                ]
                assert sampled.logprobs[row] == pytest.approx(float(relative), abs=TOLERANCE)
                if sampled is top_p_result:
                    best = (
                        everything[row][token_ids].log_softmax(0).sort(descending=True).values[:3]
                    )
                    table = torch.from_numpy(sampled.top_logprobs[row])
                    assert set(table[: len(best), 0].tolist()) <= set(token_ids)
                    torch.testing.assert_close(table[: len(best), 1], best, atol=TOLERANCE, rtol=0)
                    assert bool((table[len(best) : -1, 1] < -1e4).all())


@real_engines
async def test_the_most_likely_tokens_are_reported_with_each_token(
    open_engine: OpenEngine,
) -> None:
    async with open_engine() as engine:
        await adopt(engine, 0)
        generation = engine.generate(
            request("top", PROMPT, max_tokens=9, temperature=0.7, top_logprobs=5)
        )
        if not engine.capabilities.top_logprobs:
            with pytest.raises(ValueError):
                await generation
            return
        result, free, few = await asyncio.gather(
            generation,
            engine.generate(request("free", PROMPT, max_tokens=9)),
            engine.generate(request("few", PROMPT, max_tokens=5, seed=2, top_logprobs=2)),
        )
        assert free.top_logprobs is None
        for sampled, count, temperature in ((result, 5, 0.7), (few, 2, 1.0)):
            everything = all_logprobs(0, PROMPT, sampled.token_ids, temperature=temperature)
            ranked = everything.sort(descending=True)
            table = torch.from_numpy(sampled.top_logprobs)
            assert table.dtype == torch.float32
            assert table.shape == (len(sampled.token_ids), count + 1, 2)
            assert torch.equal(table[:, :-1, 0].long(), ranked.indices[:, :count])
            assert table[:, -1, 0].tolist() == [-1.0] * len(sampled.token_ids)
            torch.testing.assert_close(
                table[:, :-1, 1], ranked.values[:, :count], atol=TOLERANCE, rtol=0
            )
            rest = ranked.values[:, count:].logsumexp(1)
            torch.testing.assert_close(table[:, -1, 1], rest, atol=10 * TOLERANCE, rtol=0)


async def _adopt_within_response(engine: Engine, version: int) -> GenerationResult:
    """Adopts a version while a response is sampled; aborts the response 40 tokens later if it still runs."""
    generation_request = request(f"cut{version}", PROMPT, max_tokens=200, top_logprobs=3)
    task = asyncio.ensure_future(engine.generate(generation_request))
    await until(made(engine, 10))
    await adopt(engine, version)
    has_made = made(engine, 40)
    await until(lambda: task.done() or has_made())
    await engine.abort({generation_request.request_id})
    return await task


@real_engines
async def test_an_interrupted_request_keeps_the_most_likely_tokens(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        if not engine.capabilities.top_logprobs:
            pytest.skip("the engine reports no other tokens than those that it drew")
        await adopt(engine, 0)
        for before in range(_MAX_TRIES):
            # Servers sample while weights travel: on a busy host a response may end before they arrive.
            result = await _adopt_within_response(engine, before + 1)
            versions = [version for version, _ in result.version_runs]
            if versions != [before]:
                break
        assert versions == [before, before + 1]
        assert len(result.top_logprobs) == len(result.token_ids)
        begin = 0
        for version, count in result.version_runs:
            everything = all_logprobs(version, PROMPT, result.token_ids)[begin : begin + count]
            best = torch.from_numpy(result.top_logprobs)[begin : begin + count, 0, 1]
            torch.testing.assert_close(best, everything.max(1).values, atol=10 * TOLERANCE, rtol=0)
            begin += count


@real_engines
async def test_stop_texts_end_a_response_with_the_token_that_completes_one(
    open_engine: OpenEngine,
) -> None:
    async with open_engine() as engine:
        await adopt(engine, 0)
        free = await engine.generate(request("a", PROMPT, temperature=0.0, max_tokens=30))
        text = decode(free.token_ids[4:6])
        stopped = await engine.generate(
            request("b", PROMPT, temperature=0.0, max_tokens=30, stop_texts=("~~", text))
        )
        end = decode(free.token_ids).index(text) + len(text)
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids == free.token_ids[: -(-end // 2)]


@real_engines
async def test_a_stop_text_is_matched_across_the_requests_of_one_turn(
    open_engine: OpenEngine,
) -> None:
    async with open_engine() as engine:
        await adopt(engine, 0)
        free = await engine.generate(request("a", PROMPT, temperature=0.0, max_tokens=30))
        stops = {"temperature": 0.0, "max_tokens": 25, "stop_texts": (decode(free.token_ids[3:6]),)}
        context = (*PROMPT, *free.token_ids[:5])
        stopped = await engine.generate(request("b", context, turn_tokens=5, **stops))
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids == free.token_ids[5:6]


@all_engines
async def test_bad_requests_are_refused_alone(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        await adopt(engine, 0)
        good = asyncio.ensure_future(engine.generate(request("good", PROMPT[:9])))
        for context, max_tokens in [((), 8), ((1, VOCAB_SIZE), 8), ((1,), 0), ((1,), 1 << 21)]:
            with pytest.raises(ValueError, match=r"token|context"):
                await engine.generate(request("bad", context, max_tokens=max_tokens))
        assert len((await good).token_ids) == 8


@all_engines
async def test_a_cancelled_caller_frees_its_place(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        await adopt(engine, 0)
        tasks = begun(engine, [PROMPT[:9]] * 10, max_tokens=400)
        await until(lambda: engine.stats().num_running > 0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await until(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)
        assert len((await engine.generate(request("next", PROMPT[:9]))).token_ids) == 8


@all_engines
async def test_a_caller_that_leaves_while_its_request_starts_does_not_delay_weights(
    open_engine: OpenEngine,
) -> None:
    async with open_engine() as engine:
        await adopt(engine, 0)
        for num_turns in range(12):
            caller = asyncio.ensure_future(
                engine.generate(request(f"left{num_turns}", PROMPT[:9], max_tokens=400))
            )
            for _ in range(num_turns):
                await asyncio.sleep(0)
            caller.cancel()
            await asyncio.wait([caller])
        async with asyncio.timeout(60):
            await adopt(engine, 0)
