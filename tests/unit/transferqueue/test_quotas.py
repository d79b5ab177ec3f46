"""Tests of the byte quotas of runs."""

import asyncio
import time

import pytest

from services.common.errors import InvalidArgumentError, ResourceExhaustedError
from services.common.fields import run_of
from services.transferqueue.index.index import Quotas


def quotas(limit: int) -> Quotas:
    accounts = Quotas(time)
    accounts.raise_to("run", limit)
    return accounts


async def test_a_full_run_waits_until_bytes_are_freed() -> None:
    accounts = quotas(10)
    await accounts.charge("run", 8, wait_s=0)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(accounts.charge("run", 8, wait_s=10))
        await asyncio.sleep(0)
        assert not waiting.done()
        accounts.credit("run", 8)


async def test_the_error_has_the_full_resource() -> None:
    accounts = quotas(10)
    await accounts.charge("run", 8, wait_s=0)
    with pytest.raises(ResourceExhaustedError, match="quota of run: 8 of 10 bytes"):
        await accounts.charge("run", 3, wait_s=0)
    with pytest.raises(InvalidArgumentError, match="whole quota"):
        await accounts.charge("run", 11, wait_s=10)


async def test_runs_do_not_share_a_quota_and_partitions_of_a_run_do() -> None:
    accounts = quotas(10)
    await accounts.charge(run_of("run/train"), 10, wait_s=0)
    await accounts.charge(run_of("other/train"), 10, wait_s=0)
    with pytest.raises(ResourceExhaustedError):
        await accounts.charge(run_of("run/validation"), 1, wait_s=0)
    accounts.raise_to("run", 20)
    await accounts.charge("run", 10, wait_s=0)
