"""Contract of every engine on weight updates, run against each installed engine.

Each known pitfall of real engines has a test: a prefix cache that outlives its weights, tied embeddings that
keep a packed copy, updates while requests wait or were just aborted, requests between the beginning and the
end of an update.
"""

import asyncio

import pytest
import torch

from tests.contract.checks import PROMPT, TOLERANCE, adopt, assert_agrees, until
from tests.contract.engines import (
    REAL_ENGINES,
    SPECULATING_ENGINES,
    OpenEngine,
    expected_logprobs,
    weights,
)
from tests.helpers.engines import begun, made, request

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

real_engines = pytest.mark.parametrize("open_engine", [*REAL_ENGINES, *SPECULATING_ENGINES])


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
        tasks = begun(engine, [PROMPT[: 5 + seed] for seed in range(12)], max_tokens=120)
        for version in (1, 2):
            await until(made(engine, 200))
            await adopt(engine, version)
        results = [await task for task in tasks]
    for seed, result in enumerate(results):
        assert len(result.token_ids) == 120
        assert_agrees(result, PROMPT[: 5 + seed])
    assert sum(len(result.version_runs) > 1 for result in results) >= 6
    assert {version for result in results for version, _ in result.version_runs} == {0, 1, 2}


@real_engines
async def test_requests_that_wait_or_come_during_an_update_are_served_after_it(
    open_engine: OpenEngine,
) -> None:
    async with open_engine() as engine:
        await adopt(engine, 0)
        many = begun(engine, [PROMPT] * 24, max_tokens=30)
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
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
async def test_scores_are_those_of_the_live_weights(open_engine: OpenEngine, tied: bool) -> None:
    async with open_engine(tied=tied) as engine:
        for version in range(2):
            await adopt(engine, version, tied=tied)
            scored = await engine.score(PROMPT)
            expected = expected_logprobs(version, PROMPT[:1], PROMPT[1:], tied=tied)
            torch.testing.assert_close(torch.tensor(scored), expected, atol=TOLERANCE, rtol=0)


@real_engines
async def test_the_same_version_with_other_weights_reads_no_old_prefix(
    open_engine: OpenEngine,
) -> None:
    """A trainer that resumes from a checkpoint produces the same version number again."""
    async with open_engine() as engine:
        for source in (0, 1):
            await engine.adopt_weights(7, weights(source))
            result = await engine.generate(request(f"r{source}", PROMPT))
            expected = expected_logprobs(source, PROMPT, result.token_ids)
            got = torch.tensor(result.logprobs)
            torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


@real_engines
async def test_many_updates_in_a_row_meet_running_waiting_and_aborted_requests(
    open_engine: OpenEngine,
) -> None:
    """An update with retracted or queued requests must neither kill the engine nor leave old prefixes."""
    async with open_engine() as engine:
        await adopt(engine, 0)
        tasks = begun(engine, [PROMPT] * 16, max_tokens=200)
        for version in range(1, 9):
            await until(made(engine, 8))
            await engine.abort({f"r{version}"})
            await adopt(engine, version)
        await engine.abort({f"r{seed}" for seed in range(9, 16)})
        results = [await task for task in tasks]
        for result in results:
            assert_agrees(result, PROMPT)
        assert engine.stats().weight_version == 8


@real_engines
async def test_pausing_and_aborting_around_an_update_keeps_everything(
    open_engine: OpenEngine,
) -> None:
    """No step runs between the beginning and the end of an update."""
    async with open_engine() as engine:
        await adopt(engine, 0)
        tasks = begun(engine, [PROMPT[:20]] * 6, max_tokens=100)
        await until(made(engine, 30))
        await engine.pause()
        await asyncio.gather(adopt(engine, 1), engine.abort({"r0"}))
        await engine.resume()
        results = [await task for task in tasks]
    for result in results:
        assert_agrees(result, PROMPT[:20])
    assert {version for result in results[1:] for version, _ in result.version_runs} == {0, 1}


@real_engines
async def test_prefixes_that_were_computed_before_are_counted(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        await adopt(engine, 0)
        await engine.generate(request("first", PROMPT))
        before = engine.stats()
        await asyncio.gather(
            *[engine.generate(request(f"r{seed}", PROMPT, seed=seed)) for seed in range(3)]
        )
        after = engine.stats()
        assert after.prompt_tokens_total - before.prompt_tokens_total >= 3 * (len(PROMPT) - 1)
        assert after.cached_tokens_total - before.cached_tokens_total >= 2 * 64


@pytest.mark.parametrize("open_engine", [engine for engine in REAL_ENGINES if engine.id != "torch"])
async def test_what_follows_a_response_finds_what_was_computed_again_for_it(
    open_engine: OpenEngine,
) -> None:
    """An engine computes a context once per version, even if several requests contain it."""
    async with open_engine() as engine:
        await adopt(engine, 0)
        task = asyncio.ensure_future(engine.generate(request("first", PROMPT, max_tokens=200)))
        await until(made(engine, 80))
        await adopt(engine, 1)
        first = await task
        before = engine.stats()
        result = await engine.generate(request("second", PROMPT + first.token_ids, draw_offset=200))
        after = engine.stats()
        assert after.cached_tokens_total - before.cached_tokens_total >= len(PROMPT) + 200 - 64
        assert after.recomputed_tokens_total - before.recomputed_tokens_total <= 64
        assert_agrees(result, PROMPT + first.token_ids)
