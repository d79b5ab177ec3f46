"""Tests that parked groups of colocated rollouts continue on rollouts with separate GPUs."""

import pytest

from services.common.errors import UnavailableError
from services.controller.membership import Worker
from services.controller.run.dispatch import rollout_pool as module
from services.controller.run.dispatch.rollout_pool import RolloutPool


class Rollout:
    """Fake client of a rollout that records calls."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    async def interrupt_groups(self, group_ids=()):
        self.log.append(f"{self.name} interrupted")

    async def sleep(self, *, timeout_s):
        self.log.append(f"{self.name} sleeps")

    async def wake(self, *, timeout_s):
        self.log.append(f"{self.name} wakes")


def worker(name, version=3):
    return Worker(
        run_id="run",
        worker_id=name,
        incarnation="1",
        role="rollout",
        address="127.0.0.1:1",
        host_id="here",
        last_heartbeat=0.0,
        weight_version=version,
    )


@pytest.fixture
async def opened(monkeypatch):
    """Yields a function that opens a pool, some of it colocated, and returns it with the recorded calls."""
    rollout_pool = RolloutPool()

    async def open_(count, colocated):
        log, names = [], [f"rollout-{index}" for index in range(count)]
        clients = iter([Rollout(name, log) for name in names])
        monkeypatch.setattr(module, "RolloutClient", lambda channel: next(clients))
        await rollout_pool.open([worker(name) for name in names], colocated=names[:colocated])
        return rollout_pool, log

    yield open_
    await rollout_pool.close()


async def test_rollouts_that_share_gpus_hand_over_to_those_that_do_not(opened):
    replicas, log = await opened(3, colocated=2)
    await replicas.park_for_others()
    assert sorted(log) == ["rollout-0 interrupted", "rollout-1 interrupted"]
    assert (replicas.num_replicas, replicas.choose("", room=4)) == (1, ("rollout-2", 3))
    assert replicas.choose("rollout-0", room=4) == ("rollout-2", 3)
    log.clear()
    await replicas.sleep(timeout_s=1)
    await replicas.wake(timeout_s=1)
    assert sorted(log) == [f"rollout-{n} {what}" for n in (0, 1) for what in ("sleeps", "wakes")]
    assert replicas.num_replicas == 3


async def test_where_all_sleep_groups_wait_where_they_are(opened):
    replicas, log = await opened(2, colocated=2)
    await replicas.park_for_others()
    assert not log
    assert replicas.num_replicas == 2


async def test_a_rollout_that_joins_gets_groups_once_it_serves_what_the_others_serve(
    opened, monkeypatch
):
    replicas, log = await opened(1, colocated=0)
    monkeypatch.setattr(module, "RolloutClient", lambda channel: Rollout("rollout-1", log))
    late = worker("rollout-1", version=-1)
    await replicas.add([late])
    replicas.assigned("rollout-0")
    replicas.readmit_current()
    assert (replicas.num_replicas, replicas.choose("", room=4)) == (1, ("rollout-0", 3))
    assert replicas.present() == ["rollout-0"]
    late.weight_version = 3
    replicas.readmit_current()
    assert (replicas.num_replicas, replicas.choose("", room=4)) == (2, ("rollout-1", 3))


async def test_groups_wait_where_they_are_if_all_other_rollouts_are_reserved(opened):
    replicas, log = await opened(3, colocated=2)
    assert replicas.reserve(1) == ["rollout-2"]
    await replicas.park_for_others()
    assert not log


async def test_an_evaluation_reserves_no_rollout_that_sleeps_in_the_trainers_turn(opened):
    replicas, _ = await opened(3, colocated=2)
    assert replicas.reserve(2) == ["rollout-2"]
    assert replicas.reserve(1) == []  # the only rollout with its own GPUs is reserved
    for name in ("rollout-0", "rollout-1"):
        replicas._workers[name].weight_version = 4
    replicas.readmit_current()
    replicas.unreserve(["rollout-2"])
    assert replicas.reserve(1) == []  # it has not received the weights that it missed
    replicas._workers["rollout-2"].weight_version = 4
    replicas.readmit_current()
    assert replicas.reserve(1) == ["rollout-2"]
    replicas.remove(["rollout-2"])
    assert replicas.reserve(1) == []


async def test_a_rollout_that_missed_a_publication_gets_no_groups_until_it_has_the_newest_weights(
    opened,
):
    replicas, _ = await opened(2, colocated=0)
    (reserved,) = replicas.reserve(1)
    (other,) = {"rollout-0", "rollout-1"} - {reserved}
    replicas.unreserve([reserved])  # while a publication runs that began without it
    assert replicas.num_replicas == 2
    replicas._workers[other].weight_version = 4
    replicas.exclude_missed(["logp-0", reserved])
    replicas.readmit_current()
    assert replicas.present() == [other]
    assert replicas.choose(reserved, room=4) == (other, 4)
    replicas._workers[reserved].weight_version = 4
    replicas.readmit_current()
    assert replicas.choose(reserved, room=4) == (reserved, 4)


async def test_a_rollout_at_its_own_pace_gets_groups_while_it_is_not_too_far_behind(opened):
    replicas, _ = await opened(2, colocated=0)
    replicas._max_lag = 1
    near, late = (replicas._workers[name] for name in ("rollout-0", "rollout-1"))
    near.weight_version = 4
    replicas.exclude_missed(["rollout-1"])
    assert (replicas.num_replicas, replicas.oldest_version()) == (2, 3)
    assert replicas.present() == ["rollout-0"]  # an evaluation needs exactly the newest version
    near.weight_version = 5
    replicas.exclude_missed(["rollout-1"])
    assert (replicas.num_replicas, replicas.oldest_version()) == (1, 5)
    late.weight_version = 4
    replicas.readmit_current()  # the gate was opened by version 5, so that its groups could become stale
    assert (replicas.num_replicas, replicas.oldest_version()) == (1, 4)
    near.weight_version, late.weight_version = 6, 5
    replicas.exclude_missed(["rollout-1"])
    replicas.readmit_current()
    assert (replicas.num_replicas, replicas.oldest_version()) == (2, 5)
    assert replicas.present() == ["rollout-0"]
    late.weight_version = 6
    replicas.readmit_current()
    assert replicas.present() == ["rollout-0", "rollout-1"]


@pytest.mark.parametrize("version", [0, 1])
async def test_a_rollout_that_still_loads_its_first_weights_gets_no_groups(opened, version):
    replicas, _ = await opened(2, colocated=0)
    replicas._max_lag = 2
    replicas._newest_version = -1
    served, late = (replicas._workers[name] for name in ("rollout-0", "rollout-1"))
    served.weight_version, late.weight_version = version, -1
    replicas.exclude_missed(["rollout-1"])
    replicas.readmit_current()
    assert replicas.choose("rollout-1", room=4) == ("rollout-0", version)
    assert replicas.oldest_version() == version
    late.weight_version = version
    replicas.readmit_current()
    assert replicas.num_replicas == 2


async def test_a_reserved_rollout_that_misses_a_publication_stays_reserved(opened):
    replicas, _ = await opened(2, colocated=0)
    (reserved,) = replicas.reserve(1)
    replicas.exclude_missed([reserved])
    replicas.readmit_current()
    assert replicas.has_reserved([reserved])
    assert replicas.num_replicas == 1


@pytest.mark.parametrize("reason", ["joined late", "leaving"])
async def test_a_rollout_that_wakes_gets_no_groups_if_it_may_not_for_another_reason(
    opened, monkeypatch, reason
):
    replicas, log = await opened(3, colocated=2)
    if reason == "leaving":
        replicas.detach(["rollout-0"])
    else:
        replicas.remove(["rollout-0"])
        monkeypatch.setattr(module, "RolloutClient", lambda channel: Rollout("rollout-0", log))
        await replicas.add([worker("rollout-0", version=-1)])
    await replicas.park_for_others()
    await replicas.sleep(timeout_s=1)
    await replicas.wake(timeout_s=1)
    assert replicas.num_replicas == 2
    assert {replicas.choose("rollout-0", room=4)[0] for _ in range(3)} <= {"rollout-1", "rollout-2"}


async def test_where_all_others_are_about_to_leave_groups_wait_where_they_are(opened):
    replicas, log = await opened(3, colocated=2)
    replicas.detach(["rollout-2"])
    await replicas.park_for_others()
    assert not log


async def test_a_rollout_that_ends_is_woken_and_gets_nothing(opened):
    replicas, _ = await opened(3, colocated=2)
    replicas._workers["rollout-0"].state = "draining"
    replicas.detach_ending()
    await replicas.park_for_others()
    await replicas.wake(timeout_s=1)
    assert replicas.present() == ["rollout-1", "rollout-2"]
    assert replicas.choose("rollout-0", room=4) != ("rollout-0", 3)


async def test_a_rollout_that_refuses_groups_is_no_loss_if_it_is_about_to_leave(opened):
    replicas, _ = await opened(2, colocated=0)

    async def refuse(groups):
        raise UnavailableError("this replica is ending")

    replicas._clients["rollout-1"].start_groups = refuse
    with pytest.raises(ExceptionGroup):
        await replicas.start({"rollout-1": []})
    replicas.detach(["rollout-1"])
    await replicas.start({"rollout-1": []})
    replicas.remove(["rollout-1"])
    await replicas.start({"rollout-1": []})


async def test_a_late_heartbeat_readmits_no_rollout_with_older_weights(opened):
    replicas, _ = await opened(2, colocated=0)
    (reserved,) = replicas.reserve(1)
    (other,) = {"rollout-0", "rollout-1"} - {reserved}
    replicas._workers[other].weight_version = 4
    replicas.readmit_current()  # as after a publication that the reserved rollout missed
    replicas._workers[other].weight_version = 3  # a heartbeat that it sent before
    replicas.unreserve([reserved])
    assert replicas.choose(reserved, room=4)[0] == other
    replicas._workers[reserved].weight_version = replicas._workers[other].weight_version = 5
    replicas.readmit_current()
    assert replicas.choose(reserved, room=4) == (reserved, 5)


async def test_rollouts_of_a_run_without_weights_return_from_an_evaluation(opened):
    replicas, _ = await opened(2, colocated=0)
    for worker in replicas._workers.values():
        worker.weight_version = -1
    reserved = replicas.reserve(1)
    replicas.unreserve(reserved)
    assert replicas.num_replicas == 2
