"""Tests of the key-value scopes of runs: their size limits, and their deletion with the run."""

import asyncio
import time

import pytest

from services.common.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from services.controller.membership import MAX_RUN_BYTES, Membership, RendezvousStore

KIB_64 = bytes(64 << 10)


def store_of(*run_ids: str) -> RendezvousStore:
    store = RendezvousStore()
    for run_id in run_ids:
        store.open(run_id)
    return store


async def test_members_of_a_run_meet() -> None:
    store = store_of("run_1")
    waiting = asyncio.ensure_future(store.get("run_1/1", "id", 5.0))
    await asyncio.sleep(0)
    await store.set("run_1/1", "id", b"here")
    assert await waiting == b"here"
    assert [await store.add("run_1/1", "count", 2) for _ in range(2)] == [2, 4]


async def test_a_run_that_does_not_live_has_no_scopes() -> None:
    store = store_of("run_1")
    for call in (
        store.set("run_2/1", "key", b"x"),
        store.get("run_2/1", "key", 5.0),
        store.add("run_2/1", "key", 1),
    ):
        with pytest.raises(FailedPreconditionError, match="run_2"):
            await call


async def test_one_run_cannot_fill_the_memory() -> None:
    store = store_of("run_1", "run_2")
    with pytest.raises(ResourceExhaustedError, match="run_1"):
        for number in range(4000):
            await store.set("run_1/1", f"key-{number}", KIB_64)
    assert number < MAX_RUN_BYTES / len(KIB_64)
    await store.set("run_1/1", "key-0", b"replaced")
    await store.set("run_2/1", "key", KIB_64)
    with pytest.raises(InvalidArgumentError):
        await store.set("run_2/1", "k" * 300, b"")
    with pytest.raises(InvalidArgumentError):
        await store.add("run_2/1", "key", 1)


async def test_old_weight_groups_are_removed_for_new_ones() -> None:
    store = store_of("run_1")
    for epoch in range(100):
        for number in range(50):
            await store.set(f"run_1/{epoch}", f"key-{number}", KIB_64)
    assert await store.get("run_1/99", "key-0", 1.0) == KIB_64
    assert store._runs["run_1"].size_bytes < MAX_RUN_BYTES


async def test_scopes_go_with_their_run() -> None:
    membership = Membership(time, 30.0)
    membership.open_run("run_1")
    await membership.rendezvous.set("run_1/1", "key", KIB_64)
    waiting = asyncio.ensure_future(membership.rendezvous.get("run_1/1", "other", 30.0))
    await asyncio.sleep(0)
    await membership.close_run("run_1")
    with pytest.raises(FailedPreconditionError):
        await waiting
    membership.open_run("run_1")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await membership.rendezvous.get("run_1/1", "key", 1.0)
