"""Tests of the duration of a decode step, estimated from an engine's gauges."""

import asyncio

import pytest

from services.extras.fake_engine.engine import FakeEngine, LongTail
from services.extras.fake_engine.virtual_time import VirtualTimeLoop
from services.rollout.engines.base import EngineStats, GenerationRequest
from services.rollout.monitor import DecodeTimes


def stats(num_running, tokens_total, idle_seconds=0.0):
    return EngineStats(
        num_running=num_running,
        num_waiting=0,
        tokens_total=tokens_total,
        kv_used_fraction=0.0,
        idle_seconds=idle_seconds,
        weight_version=0,
    )


def test_time_without_work_between_two_looks_is_not_counted():
    times = DecodeTimes()
    for second in range(50):
        times.observe(stats(10, 500 * second, 0.5 * second), now=float(second))
    gauges = times.gauges()
    assert gauges["decode_fixed_s"] + 10 * gauges["decode_sample_s"] == pytest.approx(0.01)


def test_an_engine_whose_concurrency_swings_is_measured_right():
    engine = FakeEngine(
        max_running=256,
        step_seconds=lambda n: 0.004 + 1e-5 * n,
        lengths=LongTail(median=150, sigma=0.8),
    )
    times = DecodeTimes()

    async def burst(first):
        requests = (
            GenerationRequest(
                request_id=f"{first}.{n}", context_ids=(2,), max_tokens=2000, seed=first + n
            )
            for n in range(256)
        )
        await asyncio.gather(*map(engine.generate, requests))

    async def look():
        while True:
            times.observe(engine.stats(), now=asyncio.get_running_loop().time())
            await asyncio.sleep(0.2)

    async def serve():
        tasks = [asyncio.create_task(work) for work in (engine.run(), look())]
        for number in range(8):
            await burst(1000 * number)
            await asyncio.sleep(1.3)
        for task in tasks:
            task.cancel()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(serve())
    gauges = times.gauges()
    for samples in (16, 64, 200):
        measured = gauges["decode_fixed_s"] + samples * gauges["decode_sample_s"]
        assert measured == pytest.approx(0.004 + 1e-5 * samples, rel=0.1)


def watched(step_s, running):
    """Returns the gauges of an engine that decodes the given number of samples in each second."""
    times, tokens = DecodeTimes(), 0.0
    for second, samples in enumerate(running):
        times.observe(stats(samples, int(tokens)), now=float(second))
        tokens += samples / step_s(samples) if samples else 0
    return times.gauges()


def test_both_parts_of_a_step_are_found_where_the_concurrency_varies():
    times = watched(lambda n: 0.005 + 2e-5 * n, [n for n in (16, 64, 256, 512) for _ in range(50)])
    assert times["decode_fixed_s"] == pytest.approx(0.005, rel=0.1)
    assert times["decode_sample_s"] == pytest.approx(2e-5, rel=0.1)
    assert times["decode_max_samples"] == 512


def test_a_concurrency_that_never_varies_gives_the_right_time_there():
    times = watched(lambda n: 0.008, [128] * 50)
    at_128 = times["decode_fixed_s"] + 128 * times["decode_sample_s"]
    assert at_128 == pytest.approx(0.008, rel=0.01)
    assert times["decode_sample_s"] > 0


def test_idle_seconds_are_not_measured():
    busy = watched(lambda n: 0.008, [128] * 50)
    halting = watched(lambda n: 0.008, [*[128] * 25, *[0] * 25, *[128] * 25])
    assert halting["decode_fixed_s"] == pytest.approx(busy["decode_fixed_s"], rel=0.05)


def test_an_engine_that_made_nothing_has_no_times():
    assert watched(lambda n: 1.0, [0, 0, 0]) == {}


def test_a_time_that_falls_with_concurrency_is_no_negative_cost():
    times = watched(lambda n: 0.02 - 1e-5 * n, [n for n in (16, 512) for _ in range(50)])
    assert times["decode_sample_s"] == 0
    assert times["decode_fixed_s"] > 0
