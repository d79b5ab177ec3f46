"""Limits on requests per second and open streams of a project."""

import asyncio

import pytest

from services.controller.api.request_limits import (
    RateLimitedError,
    RequestLimits,
    TooManyStreamsError,
)
from services.controller.settings import Limits
from tests.helpers.rest import SPEC, client_of, open_manager


class Clock:
    """Fake clock that a test advances."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def limits_that(clock, **limits):
    limits_by_project = {"default": Limits(max_active_runs=1, max_queued_runs=1, **limits)}

    async def limits_of(project):
        return limits_by_project.get(project, Limits(max_active_runs=1, max_queued_runs=1))

    return RequestLimits(limits_of, clock=clock), limits_by_project


async def num_admitted(limits, count, project="default"):
    admitted = 0
    for _ in range(count):
        try:
            await limits.admit(project)
        except RateLimitedError as error:
            assert error.retry_after_s > 0
        else:
            admitted += 1
    return admitted


async def test_twice_a_seconds_requests_may_come_at_once_and_then_one_by_one():
    clock = Clock()
    limits, _ = limits_that(clock, max_requests_per_second=4)
    assert await num_admitted(limits, 20) == 8
    clock.now += 0.5
    assert await num_admitted(limits, 20) == 2
    clock.now += 60.0
    assert await num_admitted(limits, 20) == 8


async def test_a_refusal_has_a_retry_time():
    clock = Clock()
    limits, _ = limits_that(clock, max_requests_per_second=4)
    await num_admitted(limits, 8)
    with pytest.raises(RateLimitedError) as refused:
        await limits.admit("default")
    clock.now += refused.value.retry_after_s
    await limits.admit("default")


async def test_projects_do_not_take_from_each_other_and_no_limit_is_none():
    limits, _ = limits_that(Clock(), max_requests_per_second=1)
    assert await num_admitted(limits, 5) == 2
    assert await num_admitted(limits, 1000, "other") == 1000


async def test_a_limit_that_is_changed_holds_some_seconds_later():
    clock = Clock()
    limits, limits_by_project = limits_that(clock, max_requests_per_second=1)
    await num_admitted(limits, 5)
    limits_by_project["default"] = Limits(max_active_runs=1, max_queued_runs=1)
    assert await num_admitted(limits, 5) == 0
    clock.now += 6.0
    assert await num_admitted(limits, 50) == 50


async def test_streams_are_counted_while_they_are_open():
    limits, _ = limits_that(Clock(), max_event_streams=2)
    await limits.admit("default")
    with limits.stream("default"):
        with limits.stream("default"):
            assert limits.num_streams("default") == 2
            with pytest.raises(TooManyStreamsError), limits.stream("default"):
                pytest.fail("a third one is open")
        with limits.stream("default"):
            assert limits.num_streams("default") == 2
    assert limits.num_streams("default") == 0


async def test_what_is_over_a_limit_is_answered_with_429_and_when_to_come_again(database, tmp_path):
    async with (
        open_manager(database, max_requests_per_second=1) as manager,
        client_of(manager, database, tmp_path) as api,
    ):
        answers = [await api.get("/v1/version") for _ in range(12)]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert answers[0].status_code == 200
        assert refused
        assert refused[0].json()["code"] == "rate_limited"
        assert refused[0].headers["Retry-After"] == "1"


async def test_a_stream_gives_its_place_back_at_its_end(database, tmp_path):
    async with (
        open_manager(database, max_event_streams=1) as manager,
        client_of(manager, database, tmp_path) as api,
    ):
        run = (await api.post("/v1/runs", json=SPEC)).json()["id"]
        reading = asyncio.create_task(api.get(f"/v1/runs/{run}/events/stream"))
        async with asyncio.timeout(10):
            # A client gets no response when a stream opens, so the test polls the quota.
            while (await api.get("/v1/quota")).json()["event_streams"] == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        refused = await api.get("/v1/runs/stream")
        assert (refused.status_code, refused.json()["code"]) == (429, "too_many_streams")
        await api.post(f"/v1/runs/{run}/cancel")
        assert (await reading).status_code == 200
        assert (await api.get("/v1/quota")).json()["event_streams"] == 0
