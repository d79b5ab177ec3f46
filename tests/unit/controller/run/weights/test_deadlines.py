"""Tests that deadlines of weight transfers adapt to the speed of the links."""

from typing import ClassVar

import pytest

from services.common.errors import DeadlineExceededError, UnavailableError
from services.common.runspec.run import WeightSyncSpec
from services.controller.run.weights import session
from services.weightsync.canary import Canary
from services.weightsync.member import TransferReport
from tests.unit.controller.run.weights.test_members import Member, Members, worker


class Slow(Member):
    """Fake member of a weight group whose transfers take ``needs_s`` seconds, as over a slow link."""

    needs_s: ClassVar[float] = 0.0
    given_s: ClassVar[list[float]]
    is_cut: ClassVar[bool] = False
    """True if members do not reach each other."""
    epochs: ClassVar[set[int]]

    async def form_group(self, epoch, **_):
        self.epochs.add(epoch)
        if self.is_cut:
            raise DeadlineExceededError("not formed")

    async def abort(self, epoch, reason, *, timeout_s):
        pass

    async def prepare(self, epoch, version, plan_hash, *, timeout_s):
        return -1

    async def transfer(self, epoch, version, *, base_version, timeout_s):
        if self.is_cut:
            raise UnavailableError("lost a member")
        self.given_s.append(timeout_s)
        if timeout_s < self.needs_s:
            raise DeadlineExceededError("too slow")
        return TransferReport(digests=("digest",), num_bytes=1, seconds=self.needs_s)

    async def score(self, *, timeout_s):
        return Canary((), ())

    async def adopt(self, epoch, version, digest, *, timeout_s):
        return 0.0

    async def check(self, version, canary, tolerance, *, timeout_s):
        pass


@pytest.fixture
def members(monkeypatch) -> type[Slow]:
    class Own(Slow):
        given_s: ClassVar[list[float]] = []
        epochs: ClassVar[set[int]] = set()

    class Group(Members):
        async def _connect(self, address):
            return Own("cpu")

    monkeypatch.setattr(session, "WeightMembers", Group)
    return Own


async def opened(**settings) -> session.WeightSession:
    weights = session.WeightSession(WeightSyncSpec(**settings), "run")
    await weights.open(worker("trainer-0", "trainer"), [worker("rollout-0", "rollout")])
    return weights


async def test_a_transfer_over_a_slow_link_is_repeated_with_more_time(members):
    members.needs_s = 20.0
    weights = await opened()
    assert (await weights.publish(lambda: 1)).version == 1
    first, *_, last = members.given_s
    assert first < 2.0
    assert 20.0 <= last <= 80.0
    members.given_s.clear()
    members.needs_s = 0.0
    # the transfer took no time, so the deadline is the initial one
    await weights.publish(lambda: 2)
    assert set(members.given_s) == {first}


async def test_the_specification_bounds_a_transfer(members):
    members.needs_s = 20.0
    weights = await opened(transfer_timeout_s=3.0)
    with pytest.raises(DeadlineExceededError):
        await weights.publish(lambda: 1)
    assert set(members.given_s) == {3.0}


async def test_live_members_that_do_not_reach_each_other_are_reported_after_one_deadline(members):
    weights = await opened()
    members.is_cut = True
    with pytest.raises(session.InterruptedLinkError, match="trainer-0, rollout-0 answer"):
        await weights.publish(lambda: 1)
    assert len(members.epochs) == 2  # the first group, and a second one that could not be formed
