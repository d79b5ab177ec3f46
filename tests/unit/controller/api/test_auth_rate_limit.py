"""Callers with unknown tokens are limited by where they come from; known ones there are not."""

import pytest

from services.common.errors import UnauthenticatedError
from services.controller.api.principals import Principal
from services.controller.api.request_limits import AuthRateLimit, RateLimitedError
from services.controller.api.run_api import RunApi

ANN = Principal(name="ann", project="blue", role="viewer")


class Users:
    """Knows one token."""

    def __init__(self):
        self.num_asked = 0

    def authenticate(self, authorization):
        self.num_asked += 1
        if authorization != "Bearer right":
            raise UnauthenticatedError("not known")
        return ANN


class Unlimited:
    async def admit(self, project):
        """Everybody may."""


async def test_unknown_tokens_are_looked_for_at_a_rate_and_known_ones_always():
    users = Users()
    api = RunApi(None, None, None, users, Unlimited())
    assert await api.authenticate("Bearer right", "10.0.0.1") == ANN
    api._known["Bearer right"] = (ANN, 0.0)  # as it is a second later
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


def test_time_and_right_tokens_make_up_for_unknown_ones():
    now = 0.0
    auth_rate_limit = AuthRateLimit(clock=lambda: now)
    for _ in range(1000):
        auth_rate_limit.admit("here")
        auth_rate_limit.refund("here")
    for _ in range(50):
        auth_rate_limit.admit("here")
    with pytest.raises(RateLimitedError) as refused:
        auth_rate_limit.admit("here")
    assert float(refused.value.metadata["retry_after_s"]) == pytest.approx(0.1)
    now = 0.1
    auth_rate_limit.admit("here")
