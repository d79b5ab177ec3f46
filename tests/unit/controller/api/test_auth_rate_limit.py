"""Tests of the rate limit per address on requests with unknown tokens."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest
from starlette.concurrency import run_in_threadpool

from services.common.errors import UnauthenticatedError
from services.controller.api.principals import Principal
from services.controller.api.request_limits import AuthRateLimit, RateLimitedError
from services.controller.api.run_api import RunApi

ANN = Principal(name="ann", project="blue", role="viewer")


class Users:
    """Fake users with one valid token."""

    def __init__(self):
        self.num_asked = 0

    def authenticate(self, authorization):
        self.num_asked += 1
        if authorization != "Bearer right":
            raise UnauthenticatedError("not known")
        return ANN


class Unlimited:
    async def admit(self, project):
        """Admits every request."""


async def test_unknown_tokens_are_looked_for_at_a_rate_and_known_ones_always():
    users = Users()
    api = RunApi(None, None, None, users, Unlimited())
    assert await api.authenticate("Bearer right", "10.0.0.1") == ANN
    api._principals["Bearer right"] = (ANN, 0.0)  # expires the cache entry of the token
    refused = {UnauthenticatedError: 0, RateLimitedError: 0}
    for number in range(500):
        with pytest.raises((UnauthenticatedError, RateLimitedError)) as error:
            await api.authenticate(f"Bearer guess-{number}", "10.0.0.1")
        refused[error.type] += 1
    assert refused[UnauthenticatedError] == users.num_asked - 1
    assert refused[RateLimitedError] > 300
    assert await api.authenticate("Bearer right", "10.0.0.1") == ANN
    with pytest.raises(UnauthenticatedError):
        await api.authenticate("Bearer guess", "10.0.0.2")


async def test_concurrent_requests_with_one_token_share_a_lookup():
    users = Users()
    api = RunApi(None, None, None, users, Unlimited())
    await api.authenticate("Bearer right", "10.0.0.1")
    api._principals["Bearer right"] = (ANN, 0.0)  # expires the cache entry of the token
    await asyncio.gather(*[api.authenticate("Bearer right", "10.0.0.1") for _ in range(100)])
    assert users.num_asked == 2


class ValidUsers(Users):
    """Fake users for whom every token is valid and each lookup takes 1 ms."""

    def authenticate(self, authorization):
        self.num_asked += 1
        time.sleep(0.001)  # the latency of a database
        return replace(ANN, name=authorization)


async def test_a_fleet_that_starts_at_once_is_admitted():
    users = ValidUsers()
    api = RunApi(None, None, None, users, Unlimited())
    same_token = [api.authenticate("Bearer one", "10.0.0.1") for _ in range(120)]
    different_tokens = [api.authenticate(f"Bearer {number}", "10.0.0.1") for number in range(120)]
    answers = await asyncio.gather(*same_token, *different_tokens)
    assert [who.name for who in answers[120:]] == [f"Bearer {number}" for number in range(120)]
    assert users.num_asked == 121


async def test_unknown_tokens_that_arrive_at_once_are_looked_up_only_up_to_the_limit():
    users = Users()
    api = RunApi(None, None, None, users, Unlimited())
    guesses = [api.authenticate(f"Bearer guess-{number}", "10.0.0.1") for number in range(1000)]
    refused = await asyncio.gather(*guesses, return_exceptions=True)
    assert {type(error) for error in refused} == {UnauthenticatedError, RateLimitedError}
    assert users.num_asked < 60


async def test_lookups_do_not_wait_for_threads_that_read_files():
    api = RunApi(None, None, None, Users(), Unlimited())
    may_end = threading.Event()
    reading = [asyncio.ensure_future(run_in_threadpool(may_end.wait)) for _ in range(100)]
    try:
        async with asyncio.timeout(10):
            assert await api.authenticate("Bearer right", "10.0.0.1") == ANN
    finally:
        may_end.set()
        await asyncio.gather(*reading)


async def test_time_makes_up_for_unknown_tokens():
    now = 0.0
    auth_rate_limit = AuthRateLimit(clock=lambda: now)

    async def guess():
        with pytest.raises(UnauthenticatedError):
            async with auth_rate_limit.limit_lookups("here"):
                raise UnauthenticatedError("not known")

    for _ in range(50):
        await guess()
    for _ in range(2):
        with pytest.raises(RateLimitedError) as refused:
            async with auth_rate_limit.limit_lookups("here"):
                pass
        assert float(refused.value.metadata["retry_after_s"]) == pytest.approx(0.1)
    now = 0.1
    await guess()
    async with auth_rate_limit.limit_lookups("there"):
        pass
