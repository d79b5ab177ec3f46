"""Tests of the engine without a model, in virtual time."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from services.extras.fake_engine.engine import FakeEngine, LongTail
from services.extras.fake_engine.virtual_time import VirtualTimeLoop
from services.rollout.engines.base import GenerationResult
from tests.helpers.engines import request, running


def simulate(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(work)


def test_hours_pass_in_no_time_and_sleepers_wake_in_order() -> None:
    async def work() -> None:
        async def sleeper(seconds: float) -> None:
            await asyncio.sleep(seconds)
            woken.append((seconds, asyncio.get_running_loop().time()))

        woken: list[tuple[float, float]] = []
        await asyncio.gather(*[sleeper(seconds) for seconds in (7200.0, 1.0, 3600.0)])
        assert woken == [(1.0, 1.0), (3600.0, 3600.0), (7200.0, 7200.0)]

    started_at = time.monotonic()
    simulate(work())
    assert time.monotonic() - started_at < 30


def test_a_response_takes_its_length_times_the_step_time() -> None:
    async def work() -> None:
        lengths = LongTail(median=100, sigma=1.0)
        engine = FakeEngine(max_running=2, step_seconds=lambda _: 0.5, lengths=lengths)
        async with running(engine):
            result = await engine.generate(request("r", (1,), seed=3, max_tokens=10_000))
        assert len(result.token_ids) == lengths.length(3)
        assert result.finish_reason == "stop"
        assert asyncio.get_running_loop().time() == 0.5 * lengths.length(3)

    simulate(work())


def test_an_event_loop_that_comes_late_slows_no_request() -> None:
    class AsSeeds:
        def length(self, seed: int) -> int:
            return seed

    async def work() -> None:
        engine = FakeEngine(max_running=2, step_seconds=lambda _: 1.0, lengths=AsSeeds())
        async with running(engine), asyncio.TaskGroup() as tasks:
            for seed in (3, 10):
                sampling = request(f"r{seed}", (1,), seed=seed, max_tokens=100)
                tasks.create_task(engine.generate(sampling))
            await asyncio.sleep(0.5)
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualTimeLoop)
            loop._jump(20.0)
            stats = engine.stats()
        assert (stats.num_running, stats.tokens_total) == (0, 13)
        assert stats.idle_seconds == 10.5

    simulate(work())


def test_a_request_that_was_cancelled_ends_nothing_else_and_a_drain_waits_for_the_last() -> None:
    async def work() -> None:
        lengths = LongTail(median=100, sigma=0.0)
        engine = FakeEngine(max_running=3, step_seconds=lambda _: 1.0, lengths=lengths)
        async with running(engine):
            cancelled = asyncio.ensure_future(engine.generate(request("a", (1,), max_tokens=50)))
            await asyncio.sleep(10)
            other = asyncio.ensure_future(engine.generate(request("b", (1,), max_tokens=1000)))
            await asyncio.sleep(10.5)
            cancelled.cancel()
            assert engine.stats().tokens_total == 30
            await engine.pause(drain=True)
            assert engine.stats().num_running == 0
            assert asyncio.get_running_loop().time() == 110
            assert len((await other).token_ids) == 100

    simulate(work())


def test_an_interrupted_sample_has_the_same_tokens_and_the_true_versions() -> None:
    async def work() -> None:
        lengths = LongTail(median=100, sigma=0.0)
        first, second = (
            FakeEngine(max_running=2, step_seconds=lambda _: 1.0, lengths=lengths) for _ in range(2)
        )
        async with running(first), running(second):
            whole = await first.generate(request("w", (1,), max_tokens=1000))
            await first.adopt_weights(1, {})
            task = asyncio.ensure_future(first.generate(request("c", (1,), max_tokens=1000)))
            await asyncio.sleep(30.2)
            await first.adopt_weights(2, {})
            await asyncio.sleep(20)
            await first.abort()
            head: GenerationResult = await task
            assert head.version_runs == ((1, 30), (2, 20))
            assert head.logprobs == (-1.001,) * 30 + (-1.002,) * 20
            tail = await second.generate(
                request("t", (1,), max_tokens=950, draw_offset=len(head.token_ids))
            )
        assert head.token_ids + tail.token_ids == whole.token_ids

    simulate(work())
