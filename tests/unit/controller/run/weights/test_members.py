"""Tests that members of a weight group agree on a plan and on a transport."""

from types import SimpleNamespace

import pytest

from services.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    UnavailableError,
)
from services.common.runspec.run import WeightSyncSpec
from services.controller.membership import Worker
from services.controller.run.weights import members as members_module
from services.controller.run.weights.members import WeightMembers
from services.controller.run.weights.session import WeightSession
from services.weightsync.weight_plan import TensorSpec, make_plan, row_shards
from services.wire.weightsync import Agreed, Described

TENSORS = (TensorSpec("embed", (64, 4), "float32"),)


class Member:
    """Fake member of a weight group on a device."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.modes: list[str] = []

    async def describe(self):
        return Described(tensors=TENSORS, source_addresses=(), device=self._device)

    async def agree_plan(self, tensors, bucket_bytes, *, num_sources, mode, **_):
        self.modes.append(mode)
        plan = make_plan(tensors, bucket_bytes, row_shards(tensors, num_sources))
        return Agreed(plan_hash=plan.plan_hash, device=self._device)

    async def alive(self, *, timeout_s):
        pass


class Members(WeightMembers):
    """Group of fake members; a worker's address names the device of its member."""

    async def _connect(self, address):
        return Member(address)


def worker(name, device, host="host"):
    return Worker(
        run_id="run",
        worker_id=name,
        incarnation="1",
        role="rollout",
        address=device,
        host_id=host,
        last_heartbeat=0.0,
    )


async def open_on(trainer, *rollouts, **settings):
    members = Members("run", WeightSyncSpec(**settings))
    await members.open(
        worker("trainer-0", trainer),
        [worker(f"rollout-{number}", device) for number, device in enumerate(rollouts)],
    )
    return members


async def test_members_with_gpus_of_their_own_use_nccl():
    members = await open_on("cuda:a", "cuda:b", "cuda:c")
    assert members.backend() == "nccl"
    assert {tuple(member.modes) for member in members.all().values()} == {("shadow",)}


async def test_members_on_cpus_use_gloo():
    assert (await open_on("cpu", "cpu", "cpu")).backend() == "gloo"


async def test_members_that_share_one_gpu_take_weights_by_handle_or_through_host_memory():
    members = await open_on("cuda:a", "cuda:a", "cuda:a")
    assert members.backend() == "handle"
    assert {tuple(member.modes) for member in members.all().values()} == {("shadow", "shadow")}
    await members.switch_transfer_path(FailedPreconditionError("cannot be opened"))
    assert members.backend() == "gloo"
    with pytest.raises(FailedPreconditionError, match="again"):
        await members.switch_transfer_path(FailedPreconditionError("again"))


async def test_members_that_share_several_gpus_go_through_host_memory():
    members = await open_on("cuda:a", "cuda:b", "cuda:b")
    assert members.backend() == "gloo"
    assert {tuple(member.modes) for member in members.all().values()} == {("shadow", "cpu_async")}


async def test_a_rollout_that_only_orders_transfers_may_see_the_trainers_gpu():
    members = await open_on("cuda:a", "cuda:a", mode="servers")
    assert members.backend() == "servers"
    assert {tuple(member.modes) for member in members.all().values()} == {("servers",)}


async def test_a_rollout_joins_where_weights_reach_it_as_they_travel():
    members = await open_on("cuda:a", "cuda:b")
    assert await members.admit([worker("rollout-1", "cuda:c")])
    assert [*members.rollouts] == ["rollout-0", "rollout-1"]
    assert not await members.admit([worker("rollout-2", "cuda:c")])
    assert [*members.rollouts] == ["rollout-0", "rollout-1"]
    with pytest.raises(FailedPreconditionError, match="cpu_async"):
        await members.admit([worker("rollout-2", "cpu")])
    assert members.backend() == "nccl"
    by_handle = await open_on("cuda:a", "cuda:a")
    assert await by_handle.admit([worker("rollout-1", "cuda:a")])
    assert not await by_handle.admit([worker("rollout-2", "cuda:b")])


async def test_a_peer_is_nearer_than_a_trainer_on_another_host():
    members = await open_on("cuda:a", "cuda:b")
    far = [worker(name, f"cuda:{name}", host="far") for name in ("rollout-1", "rollout-2")]
    assert await members.admit(far[:1])
    assert members.peers(["rollout-1"]) == {}
    assert await members.admit(far[1:])
    assert members.peers(["rollout-2"]) == {"rollout-1": ["rollout-2"]}
    assert members.peers(["rollout-0"]) == {}


async def test_a_trainer_that_is_not_reached_is_named(monkeypatch):
    async def describe(self):
        raise UnavailableError("failed to connect")

    monkeypatch.setattr(Member, "describe", describe)
    with pytest.raises(UnavailableError, match="trainer-0"):
        await open_on("cpu", "cpu")


async def test_a_handle_between_gpus_is_refused_with_the_fix():
    members = await open_on("cuda:a", "cuda:b", backend="handle")
    with pytest.raises(FailedPreconditionError, match=r"got handle.*cpu_async"):
        members.backend()


async def test_gloo_on_a_shared_gpu_goes_through_host_memory():
    members = await open_on("cuda:a", "cuda:a", backend="gloo")
    assert members.backend() == "gloo"


async def test_nccl_on_a_shared_gpu_is_refused_with_the_fix():
    members = await open_on("cuda:a", "cuda:a", backend="nccl")
    with pytest.raises(FailedPreconditionError, match=r"^weight_sync\.backend"):
        members.backend()


async def test_a_gpu_on_one_side_only_is_refused_with_the_fix():
    members = await open_on("cuda:a", "cpu")
    with pytest.raises(FailedPreconditionError, match="cpu_async"):
        members.backend()


class Late(Member):
    """Fake member that misses the deadline of its first ``times`` calls.

    Args:
        stands_still_s: Seconds by which each missed call advances the clock, as if this process was stopped.
    """

    def __init__(self, clock: list[float], *, times: int, stands_still_s: float) -> None:
        super().__init__("cpu")
        self._clock = clock
        self._times = times
        self._stands_still_s = stands_still_s

    async def abort(self, epoch, reason, *, timeout_s):
        self._times -= 1
        if self._times >= 0:
            self._clock[0] += self._stands_still_s
            raise DeadlineExceededError(f"no answer in {timeout_s} s")


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(members_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


async def absent(**members):
    group = Members("run", WeightSyncSpec(answer_timeout_s=1.0))
    group.rollouts = members
    group.note_prepared(members)
    return await group.abort(1, "a test")


async def test_a_member_is_not_blamed_for_time_in_which_the_controller_stood_still(clock):
    assert await absent(woken=Late(clock, times=1, stands_still_s=5.0)) == []


async def test_a_member_that_does_not_answer_in_time_is_named(clock):
    silent = {
        "in_time": Late(clock, times=1, stands_still_s=0.0),
        "never": Late(clock, times=9, stands_still_s=5.0),
    }
    assert await absent(**silent) == ["in_time", "never"]


async def test_weights_without_receivers_are_counted_and_not_sent():
    session = WeightSession(WeightSyncSpec(), "run")
    await session.open(worker("trainer-0", "an address that nobody has"), [])
    report = await session.publish(lambda: 5)
    await session.close()
    assert (report.version, session.version, report.num_bytes, report.lost) == (5, 5, 0, ())
