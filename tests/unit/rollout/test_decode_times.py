"""What a decode step costs is learnt from an engine's gauges."""

import pytest

from services.rollout.decode_times import DecodeTimes
from services.rollout.engines.base import EngineStats


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
    found = times.gauges()
    assert found["decode_fixed_s"] + 10 * found["decode_sample_s"] == pytest.approx(0.01)


def watched(step_s, running):
    """An engine that decodes so many samples in each second."""
    times, tokens = DecodeTimes(), 0.0
    for second, samples in enumerate(running):
        times.observe(stats(samples, int(tokens)), now=float(second))
        tokens += samples / step_s(samples) if samples else 0
    return times.gauges()


def test_both_parts_of_a_step_are_found_where_the_concurrency_varies():
    found = watched(lambda n: 0.005 + 2e-5 * n, [n for n in (16, 64, 256, 512) for _ in range(50)])
    assert found["decode_fixed_s"] == pytest.approx(0.005, rel=0.1)
    assert found["decode_sample_s"] == pytest.approx(2e-5, rel=0.1)
    assert found["decode_most_samples"] == 512


def test_a_concurrency_that_never_varies_gives_the_right_time_there():
    found = watched(lambda n: 0.008, [128] * 50)
    at_128 = found["decode_fixed_s"] + 128 * found["decode_sample_s"]
    assert at_128 == pytest.approx(0.008, rel=0.01)
    assert found["decode_sample_s"] > 0


def test_seconds_without_work_say_nothing():
    busy = watched(lambda n: 0.008, [128] * 50)
    halting = watched(lambda n: 0.008, [*[128] * 25, *[0] * 25, *[128] * 25])
    assert halting["decode_fixed_s"] == pytest.approx(busy["decode_fixed_s"], rel=0.05)


def test_an_engine_that_made_nothing_has_no_times():
    assert watched(lambda n: 1.0, [0, 0, 0]) == {}


def test_a_time_that_falls_with_concurrency_is_no_negative_cost():
    found = watched(lambda n: 0.02 - 1e-5 * n, [n for n in (16, 512) for _ in range(50)])
    assert found["decode_sample_s"] == 0
    assert found["decode_fixed_s"] > 0
