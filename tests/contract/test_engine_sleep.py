"""Contract of every engine that can sleep, run against each installed engine."""

import asyncio

import pytest

from tests.contract.checks import PROMPT, adopt, assert_agrees, until
from tests.contract.engines import ALL_SLEEPERS, SLEEPERS, OpenEngine
from tests.helpers.engines import begun, made, request

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

sleepers = pytest.mark.parametrize("open_engine", SLEEPERS)
all_sleepers = pytest.mark.parametrize("open_engine", ALL_SLEEPERS)


@sleepers
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
async def test_responses_continue_under_the_weights_of_the_wake(
    open_engine: OpenEngine, tied: bool
) -> None:
    async with open_engine(tied=tied) as engine:
        await adopt(engine, 0, tied=tied)
        tasks = begun(engine, [PROMPT[: 5 + seed] for seed in range(12)], max_tokens=120)
        for version in (1, 2):
            await until(made(engine, 200))
            await engine.sleep()
            await engine.wake()
            await adopt(engine, version, tied=tied)
            await engine.resume()
        results = [await task for task in tasks]
    for seed, result in enumerate(results):
        assert len(result.token_ids) == 120
        assert_agrees(result, PROMPT[: 5 + seed], tied=tied)
    assert sum(len(result.version_runs) > 1 for result in results) >= 6
    assert {version for result in results for version, _ in result.version_runs} == {0, 1, 2}


@all_sleepers
async def test_an_engine_makes_no_token_between_sleep_and_new_weights(
    open_engine: OpenEngine,
) -> None:
    async with open_engine() as engine:
        await adopt(engine, 3)
        running = asyncio.ensure_future(engine.generate(request("runs", PROMPT, max_tokens=300)))
        await until(made(engine, 10))
        await engine.sleep()
        waits = asyncio.ensure_future(engine.generate(request("waits", PROMPT, max_tokens=20)))
        before = engine.stats()
        assert before.is_asleep
        await engine.sleep()
        for _ in range(2):
            await engine.resume()
            await asyncio.sleep(0.02)
            assert engine.stats().tokens_total == before.tokens_total
            await engine.wake()
        assert engine.stats().is_asleep
        await adopt(engine, 4)
        await engine.resume()
        assert not engine.stats().is_asleep
        assert (await waits).version_runs == ((4, 20),)
        versions = [version for version, _ in (await running).version_runs]
        assert versions == [3, 4]


@all_sleepers
async def test_requests_of_an_engine_that_sleeps_can_be_ended_with_what_they_have(
    open_engine: OpenEngine,
) -> None:
    async with open_engine() as engine:
        await adopt(engine, 5)
        task = asyncio.ensure_future(engine.generate(request("cut", PROMPT, max_tokens=300)))
        await until(made(engine, 10))
        await engine.sleep()
        peeked = (await engine.peek())["cut"]
        await engine.abort()
        result = await task
        assert result.finish_reason == "aborted"
        assert result.token_ids == peeked.token_ids
        await engine.wake()
        await adopt(engine, 6)
        await engine.resume()


@all_sleepers
async def test_an_engine_that_sleeps_takes_no_weights(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        await adopt(engine, 7)
        await engine.sleep()
        with pytest.raises(AssertionError, match="wake it first"):
            await adopt(engine, 8)
        await engine.wake()
        await adopt(engine, 8)
        await engine.resume()
        assert (await engine.generate(request("r", PROMPT))).version_runs == ((8, 8),)
