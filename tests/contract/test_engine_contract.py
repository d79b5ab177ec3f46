"""What every engine must do, run against each that is installed.

The traps that real engines lay each have a test here: a prefix cache that outlives its weights, tied
embeddings that keep a packed copy, updates while requests wait, requests while weights are loaded.
"""

import asyncio
from collections.abc import Callable

import pytest
import torch

from services.rollout.engines.base import Engine, GenerationResult
from tests.contract.engines import (
    ALL_ENGINES,
    REAL_ENGINES,
    VOCAB_SIZE,
    OpenEngine,
    expected_logprobs,
    request,
    weights,
)

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]

TOLERANCE = 1e-4
PROMPT = tuple(3 + (7 * i) % (VOCAB_SIZE - 3) for i in range(100))

real_engines = pytest.mark.parametrize("open_engine", REAL_ENGINES)
all_engines = pytest.mark.parametrize("open_engine", ALL_ENGINES)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 -- engines announce no tokens
        await asyncio.sleep(0.001)


def made(engine: Engine, num_tokens: int) -> Callable[[], bool]:
    """Whether that many tokens were sampled since now."""
    before = engine.stats().tokens_total
    return lambda: engine.stats().tokens_total >= before + num_tokens


async def adopt(engine: Engine, version: int, *, tied: bool = True) -> None:
    tensors = weights(version, tied=tied) if engine.weight_specs() else {}
    await engine.adopt_weights(version, tensors)


def assert_agrees(result: GenerationResult, context: tuple[int, ...], *, tied: bool = True) -> None:
    """Every token has the logprob that its version's weights give it after the whole context."""
    start = 0
    assert sum(count for _, count in result.version_runs) == len(result.token_ids)
    for version, count in result.version_runs:
        tokens = result.token_ids[start : start + count]
        before = context + result.token_ids[:start]
        expected = expected_logprobs(version, before, tokens, tied=tied)
        got = torch.tensor(result.logprobs[start : start + count])
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
        start += count


@real_engines
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
async def test_logprobs_agree_after_every_update_for_the_same_prompt(
    open_engine: OpenEngine, tied: bool
) -> None:
    async with open_engine(tied=tied) as engine:
        for version in range(3):
            await adopt(engine, version, tied=tied)
            results = await asyncio.gather(
                *[
                    engine.generate(request(f"{version}.{seed}", PROMPT, seed=seed))
                    for seed in range(4)
                ]
            )
            for result in results:
                assert [run[0] for run in result.version_runs] == [version]
                assert_agrees(result, PROMPT, tied=tied)


@real_engines
async def test_updates_in_the_middle_of_generation_give_exact_versions(
    open_engine: OpenEngine,
) -> None:
    async with open_engine() as engine:
        await adopt(engine, 0)
        tasks = [
            asyncio.ensure_future(
                engine.generate(request(f"r{seed}", PROMPT[: 5 + seed], seed=seed, max_tokens=120))
            )
            for seed in range(12)
        ]
        for version in (1, 2):
            await until(made(engine, 200))
            await adopt(engine, version)
        results = [await task for task in tasks]
    for seed, result in enumerate(results):
        assert len(result.token_ids) == 120
        assert_agrees(result, PROMPT[: 5 + seed])
    assert sum(len(result.version_runs) > 1 for result in results) >= 6
    assert {version for result in results for version, _ in result.version_runs} == {0, 1, 2}


@all_engines
async def test_aborted_requests_keep_tokens_logprobs_and_versions(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        await adopt(engine, 5)
        tasks = [
            asyncio.ensure_future(
                engine.generate(request(f"r{seed}", PROMPT[:9], seed=seed, max_tokens=400))
            )
            for seed in range(12)
        ]
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
        await until(lambda: engine.stats().num_running == 1)
        draining = asyncio.ensure_future(engine.pause(drain=True))
        await asyncio.sleep(0)
        new = asyncio.ensure_future(engine.generate(request("new", PROMPT[:9], max_tokens=5)))
        await draining
        assert (await old).version_runs == ((0, 60),)
        await adopt(engine, 1)
        await engine.resume()
        assert (await new).version_runs == ((1, 5),)


@real_engines
async def test_requests_that_wait_or_come_during_an_update_are_served_after_it(
    open_engine: OpenEngine,
) -> None:
    async with open_engine() as engine:
        await adopt(engine, 0)
        many = [
            asyncio.ensure_future(
                engine.generate(request(f"r{seed}", PROMPT, seed=seed, max_tokens=30))
            )
            for seed in range(24)
        ]
        await until(lambda: engine.stats().num_waiting > 0)
        updating = asyncio.ensure_future(adopt(engine, 1))
        await asyncio.sleep(0)
        during = asyncio.ensure_future(engine.generate(request("during", PROMPT)))
        await updating
        results = [await task for task in (*many, during)]
    for result in results:
        assert_agrees(result, PROMPT)


@real_engines
async def test_weights_that_do_not_fit_are_refused_and_change_nothing(
    open_engine: OpenEngine,
) -> None:
    async with open_engine() as engine:
        await adopt(engine, 0)
        bad = weights(1)
        name = next(iter(bad))
        without = {key: value for key, value in bad.items() if key != name}
        for wrong in (without, bad | {"surprise": bad[name]}, bad | {name: bad[name][:-1]}):
            with pytest.raises(ValueError, match="same model"):
                await engine.adopt_weights(1, wrong)
        result = await engine.generate(request("r", PROMPT))
        assert result.version_runs == ((0, 8),)
        assert_agrees(result, PROMPT)


@real_engines
async def test_seeds_stop_tokens_limits_and_greedy(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        await adopt(engine, 0)
        first, again, other = await asyncio.gather(
            engine.generate(request("a", PROMPT, seed=7, max_tokens=30)),
            engine.generate(request("b", PROMPT, seed=7, max_tokens=30)),
            engine.generate(request("c", PROMPT, seed=8, max_tokens=30)),
        )
        assert first.token_ids == again.token_ids != other.token_ids
        assert first.finish_reason == "length"
        stop = first.token_ids[10]
        stopped = await engine.generate(
            request("d", PROMPT, seed=7, max_tokens=30, stop_token_ids=frozenset({stop}))
        )
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids == first.token_ids[: first.token_ids.index(stop) + 1]
        greedy = await engine.generate(request("e", PROMPT, temperature=0.0))
        assert_agrees(greedy, PROMPT)


@real_engines
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
async def test_scores_are_those_of_the_live_weights(open_engine: OpenEngine, tied: bool) -> None:
    async with open_engine(tied=tied) as engine:
        for version in range(2):
            await adopt(engine, version, tied=tied)
            scored = await engine.score(PROMPT)
            expected = expected_logprobs(version, PROMPT[:1], PROMPT[1:], tied=tied)
            torch.testing.assert_close(torch.tensor(scored), expected, atol=TOLERANCE, rtol=0)


@all_engines
async def test_scoring_goes_on_while_requests_run(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        await adopt(engine, 0)
        running = asyncio.ensure_future(engine.generate(request("r", PROMPT[:9], max_tokens=100)))
        await until(made(engine, 5))
        assert len(await engine.score(PROMPT)) == len(PROMPT) - 1
        for ids in ((), (1,), (1, VOCAB_SIZE), (1,) * (1 << 21)):
            with pytest.raises(ValueError, match="token"):
                await engine.score(ids)
        assert len((await running).token_ids) == 100


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
        tasks = [
            asyncio.ensure_future(
                engine.generate(request(f"r{seed}", PROMPT[:9], seed=seed, max_tokens=400))
            )
            for seed in range(10)
        ]
        await until(lambda: engine.stats().num_running > 0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await until(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)
        assert len((await engine.generate(request("next", PROMPT[:9]))).token_ids) == 8
