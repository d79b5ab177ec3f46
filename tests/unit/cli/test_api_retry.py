"""Tests of the client's retries during a restart of the controller."""

import httpx
import pytest

from services.cli.api import Api, ApiError
from services.controller.api.operations import GetVersion, PauseRun


def api_of(num_failures, calls, **options):
    async def answer(request):
        calls.append((request.method, request.headers.get("Idempotency-Key")))
        if len(calls) <= num_failures:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json={"version": "1"})

    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    return Api("http://controller", http=http, **options)


async def test_requests_are_retried_until_the_controller_answers():
    calls = []
    async with api_of(1, calls, retry_s=30.0) as api:
        assert (await api.call(GetVersion())).version == "1"
    assert len(calls) == 2


async def test_an_unreachable_controller_fails_at_once_without_retries():
    calls = []
    async with api_of(1, calls) as api:
        with pytest.raises(ApiError, match="no controller answers"):
            await api.call(GetVersion())


async def test_only_idempotent_requests_are_retried():
    calls = []
    async with api_of(1, calls, retry_s=30.0) as api:
        with pytest.raises(ApiError):
            await api.call(PauseRun(run_id="run_" + "0" * 32))
    assert len(calls) == 1
