"""Tests that the watch detects a dead engine, and does not report a busy or idle one."""

from dataclasses import replace

import pytest

from services.rollout.engines.base import EngineStats
from services.rollout.monitor import EngineStalledError, ProgressWatch
from services.rollout.sampling.sampler import EpisodeWatch


def stats(num_running: int, tokens_total: int, weight_version: int = 0) -> EngineStats:
    return EngineStats(
        num_running=num_running,
        num_waiting=0,
        tokens_total=tokens_total,
        kv_used_fraction=0.0,
        idle_seconds=0.0,
        weight_version=weight_version,
    )


def test_requests_without_tokens_past_the_deadline_are_a_stall() -> None:
    watch = ProgressWatch(deadline_s=10)
    watch.check(stats(3, 100), now=0)
    watch.check(stats(3, 100), now=10)
    with pytest.raises(EngineStalledError, match=r"3 requests.*11 s"):
        watch.check(stats(3, 100), now=11)


def test_tokens_updates_and_idleness_are_no_stall() -> None:
    watch = ProgressWatch(deadline_s=10)
    for now, report in enumerate(
        [stats(3, 1), stats(3, 2), stats(0, 2), stats(3, 2), stats(3, 2, weight_version=1)]
    ):
        watch.check(report, now=9.0 * now)
    watch.check(stats(3, 2, weight_version=1), now=9.0 * 5)


def test_an_engine_that_sleeps_is_no_stall() -> None:
    watch = ProgressWatch(deadline_s=10)
    watch.check(stats(3, 1), now=0)
    watch.check(replace(stats(3, 1), is_asleep=True), now=100)
    watch.check(stats(3, 1), now=110)
    with pytest.raises(EngineStalledError):
        watch.check(stats(3, 1), now=111)


def test_an_episode_stalls_by_inactivity_and_never_by_age() -> None:
    watch = EpisodeWatch(deadline_s=600)
    day_s = 86_400
    for second in range(0, day_s, 300):
        assert watch.find_stalled({"g1": {0: second, 1: 7 * second}}, now=second) == {}
    assert watch.find_stalled({"g1": {0: 0, 1: 0}}, now=day_s) == {}
    assert watch.find_stalled({"g1": {0: 0, 1: 1}}, now=day_s + 600) == {}
    (why,) = watch.find_stalled({"g1": {0: 0, 1: 2}}, now=day_s + 601).values()
    assert why.startswith("member 0 ")
    assert "601 s" in why


def test_a_restarted_episode_restarts_its_deadline() -> None:
    watch = EpisodeWatch(deadline_s=10)
    watch.find_stalled({"g1": {0: 5}}, now=0)
    watch.find_stalled({}, now=5)
    assert watch.find_stalled({"g1": {0: 5}}, now=20) == {}
