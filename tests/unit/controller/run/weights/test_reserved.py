"""Tests that reserved rollouts keep their weights, and which publication they join afterwards."""

import asyncio

import pytest

from services.common.runspec.run import WeightSyncSpec
from services.controller.run.weights import session
from services.weightsync.canary import Canary
from services.weightsync.member import TransferReport
from tests.unit.controller.run.weights.test_members import Member, Members, worker

ALL = ("rollout-0", "rollout-1")


class Quick(Member):
    """Fake member that answers each call at once; a transfer ends when a test permits it."""

    def __init__(self, may_transfer):
        super().__init__("cpu")
        self._may_transfer = may_transfer

    async def form_group(self, epoch, **_):
        """Does nothing."""

    async def prepare(self, epoch, version, plan_hash, *, timeout_s):
        return -1

    async def transfer(self, epoch, version, *, base_version, timeout_s):
        await self._may_transfer.wait()
        return TransferReport(digests=("digest",), num_bytes=1, seconds=0.0)

    async def score(self, *, timeout_s):
        return Canary((), ())

    async def adopt(self, epoch, version, digest, *, timeout_s):
        return 0.0

    async def check(self, version, canary, tolerance, *, timeout_s):
        """Does nothing."""


@pytest.fixture
def may_transfer() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@pytest.fixture
async def weights(monkeypatch, may_transfer) -> session.WeightSession:
    """Returns a session with two rollouts, of which ``rollout-1`` is reserved at version 1."""

    class Group(Members):
        async def _connect(self, address):
            return Quick(may_transfer)

    monkeypatch.setattr(session, "WeightMembers", Group)
    weights = session.WeightSession(WeightSyncSpec(), "run")
    await weights.open(worker("trainer-0", "cpu"), [worker(name, "cpu") for name in ALL])
    assert (await weights.publish(lambda: 1)).receivers == ALL
    async with weights.pin:
        weights.reserve(["rollout-1"])
    return weights


async def test_a_reserved_rollout_receives_no_weights_until_it_returns(weights):
    assert (await weights.publish(lambda: 2)).receivers == ("rollout-0",)
    weights.unreserve(["rollout-1"])
    assert (await weights.publish(lambda: 3)).receivers == ALL


async def test_a_rollout_that_returns_in_the_trainers_turn_receives_its_weights(weights):
    async with weights.pin:
        weights.unreserve(["rollout-1"])
        assert (await weights.replace(lambda: 2)).receivers == ALL


async def test_a_rollout_that_returns_during_a_publication_joins_the_next_one(
    weights, may_transfer
):
    may_transfer.clear()
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        publication = tasks.create_task(weights.publish(lambda: 2))
        while not weights.pin.locked():  # noqa: ASYNC110 -- the session reports no start
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        weights.unreserve(["rollout-1"])
        may_transfer.set()
    assert publication.result().receivers == ("rollout-0",)
    assert (await weights.publish(lambda: 3)).receivers == ALL


async def test_a_rollout_that_returned_can_be_reserved_again_before_it_receives_weights(weights):
    weights.unreserve(["rollout-1"])
    async with weights.pin:
        weights.reserve(["rollout-1"])
    assert (await weights.publish(lambda: 2)).receivers == ("rollout-0",)


async def test_a_rollout_that_returned_can_be_removed(weights):
    weights.unreserve(["rollout-1"])
    await weights.remove_rollouts(["rollout-1"])
    assert (await weights.publish(lambda: 2)).receivers == ("rollout-0",)
