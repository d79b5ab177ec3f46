"""Publication of weights during training: the newest version, one at a time, before the gate opens."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from services.common.errors import UnavailableError
from services.controller.run.publisher import Publisher
from services.controller.run.weights.session import SyncReport


class Collaborators:
    """Fake collaborators of the publisher; a publication waits until the test permits it."""

    is_needed = is_lacking = False

    def __init__(self):
        self.may_publish = asyncio.Event()
        self.may_publish.set()
        self.published, self.opened, self.lost = [], [], ()
        self.weights = self
        self.serving = [rollout("rollout-0")]
        self.missed, self.is_missing, self.late = [], set(), ()
        self.rollout_pool = SimpleNamespace(
            readmit_current=lambda: None,
            oldest_version=self.oldest_version,
            exclude_missed=lambda names: self.missed.append((names, [*self.opened])),
        )
        self.is_reached, self.copied, self.near, self.version = True, -1, [], -1
        self.progress = SimpleNamespace(
            num_steps=0, record_sync=lambda report: None, summary=lambda ledger: {}
        )

    def oldest_version(self):
        return min(worker.weight_version for worker in self.serving)

    def served_by(self, version):
        names = (worker.worker_id for worker in self.serving)
        return tuple(name for name in names if name not in self.is_missing)

    async def follow(self, on_late):
        self.on_late = on_late
        await asyncio.Event().wait()

    def has_copy(self, version):
        return version == self.copied

    async def admit(self, rollouts):
        self.serving.extend(rollouts)
        return self.is_reached

    async def send_from_peers(self, names):
        return self.near

    async def publish(self, newest):
        await self.may_publish.wait()
        await asyncio.sleep(0)
        self.is_lacking = False
        self.published.append(newest())
        self.copied = self.version = newest()
        names = [worker.worker_id for worker in self.serving]
        receivers = tuple(name for name in names if name not in self.is_missing)
        times = dict.fromkeys(
            ("copy_s", "prepare_s", "transfer_s", "adopt_s", "check_s", "stall_s"), 0.0
        )
        return SyncReport(
            version=newest(),
            digest="",
            num_bytes=1,
            receivers=receivers,
            lost=self.lost,
            late=self.late,
            **times,
        )


async def nothing(*args, **kwargs):
    """Stands for the evaluator and the journal, and does nothing."""


def rollout(name):
    return SimpleNamespace(worker_id=name, weight_version=-1)


def make_publisher(connections):
    return Publisher(
        spec=SimpleNamespace(num_steps=9),
        journal=SimpleNamespace(record_event=nothing),
        connections=connections,
        ledger=None,
        scheduler=SimpleNamespace(published=connections.opened.append),
        evaluator=SimpleNamespace(published=nothing),
        gpu_time_sharing=connections,
        progress=connections.progress,
        version_offset=100,
    )


async def trained(publisher, step):
    publisher.progress.num_steps = step
    await publisher.offer(step)


async def test_versions_that_are_overtaken_are_never_sent():
    connections = Collaborators()
    publisher = make_publisher(connections)
    connections.may_publish.clear()
    task = asyncio.create_task(publisher.run())
    for step in (1, 2, 3):
        await trained(publisher, step)
        assert publisher.is_busy
    connections.may_publish.set()
    await publisher.wait_served(2)
    assert connections.published == [103]
    assert connections.opened == [3]
    assert connections.serving[0].weight_version == 103
    await publisher.wait_idle()
    assert not publisher.is_busy
    task.cancel()


async def test_weights_that_changed_since_their_offer_are_sent_under_their_own_version():
    connections = Collaborators()
    publisher = make_publisher(connections)
    connections.may_publish.clear()
    task = asyncio.create_task(publisher.run())
    await trained(publisher, 1)
    connections.progress.num_steps = 2
    connections.may_publish.set()
    await publisher.wait_served(2)
    await publisher.offer(2)
    await publisher.wait_idle()
    assert connections.published == [102]
    task.cancel()


async def test_a_rollout_that_joins_gets_the_copy_while_the_trainer_is_ahead():
    connections = Collaborators()
    publisher = make_publisher(connections)
    task = asyncio.create_task(publisher.run())
    await trained(publisher, 1)
    await publisher.wait_served(1)
    connections.progress.num_steps = 2
    late = rollout("rollout-1")
    assert await publisher.admit([late])
    await publisher.wait_all_serve()
    assert (connections.published, late.weight_version) == ([101, 101], 101)
    task.cancel()


async def test_what_was_served_before_opens_the_gate_and_is_not_sent_again():
    connections = Collaborators()
    publisher = make_publisher(connections)
    task = asyncio.create_task(publisher.run())
    await publisher.record_served(4)
    await publisher.wait_served(4)
    assert (connections.published, connections.opened) == ([], [4])
    task.cancel()


async def test_a_rollout_that_joins_gets_what_is_served_and_nothing_is_evaluated_again():
    connections, evaluated = Collaborators(), []
    publisher = make_publisher(connections)

    async def published(version, **kwargs):
        evaluated.append(version)

    publisher.evaluator.published = published
    task = asyncio.create_task(publisher.run())
    await trained(publisher, 1)
    await publisher.wait_served(1)
    late = rollout("rollout-1")
    assert await publisher.admit([late])
    assert publisher.is_busy
    await publisher.wait_all_serve()
    assert (connections.published, evaluated, late.weight_version) == ([101, 101], [101], 101)
    assert connections.opened == [1, 1]
    assert not publisher.is_busy
    task.cancel()


async def test_a_rollout_that_joins_waits_for_the_next_version_where_no_copy_is_left():
    connections = Collaborators()
    publisher = make_publisher(connections)
    task = asyncio.create_task(publisher.run())
    await publisher.record_served(4)
    late = rollout("rollout-1")
    assert await publisher.admit([late])
    assert not publisher.is_busy
    await trained(publisher, 5)
    await publisher.wait_all_serve()
    assert (connections.published, late.weight_version) == ([105], 105)
    task.cancel()


async def test_in_turns_nothing_is_published_for_a_rollout_that_joins_alone():
    connections = Collaborators()
    publisher = make_publisher(connections)
    task = asyncio.create_task(publisher.run())
    await trained(publisher, 1)
    await publisher.wait_served(1)
    connections.is_needed = True
    late = rollout("rollout-1")
    assert await publisher.admit([late])
    assert not publisher.is_busy
    await trained(publisher, 2)
    await publisher.wait_all_serve()
    assert (connections.published, late.weight_version) == ([101, 102], 102)
    task.cancel()


async def test_what_a_peer_has_sent_is_not_sent_again():
    connections = Collaborators()
    publisher = make_publisher(connections)
    task = asyncio.create_task(publisher.run())
    await trained(publisher, 1)
    await publisher.wait_served(1)
    late, connections.near = rollout("rollout-1"), ["rollout-1"]
    assert await publisher.admit([late])
    await publisher.wait_all_serve()
    assert (connections.published, connections.opened, late.weight_version) == ([101], [1, 1], 101)
    task.cancel()


async def test_a_rollout_that_weights_do_not_reach_is_not_waited_for():
    connections = Collaborators()
    connections.is_reached = False
    publisher = make_publisher(connections)
    assert not await publisher.admit([rollout("rollout-1")])
    await publisher.wait_all_serve()


async def test_a_rollout_that_misses_a_version_is_excluded_before_the_gate_opens():
    connections = Collaborators()
    connections.serving.append(rollout("rollout-1"))
    connections.is_missing = {"rollout-1"}
    publisher = make_publisher(connections)
    task = asyncio.create_task(publisher.run())
    await trained(publisher, 1)
    await publisher.wait_served(1)
    assert (connections.missed, connections.opened) == ([(["rollout-1"], [])], [1])
    assert [worker.weight_version for worker in connections.serving] == [101, -1]
    task.cancel()


async def test_a_rollout_that_took_no_part_is_a_loss():
    connections = Collaborators()
    connections.lost = ("rollout-0",)
    publisher = make_publisher(connections)
    await trained(publisher, 1)
    with pytest.raises(UnavailableError, match="rollout-0"):
        await publisher.run()
    assert not connections.opened


@asynccontextmanager
async def running(publisher):
    """Publishes versions, to late rollouts too, in the block."""
    tasks = [asyncio.create_task(publisher.run()), asyncio.create_task(publisher.follow())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


async def test_the_gate_opens_by_the_oldest_weights_that_receive_groups():
    connections = Collaborators()
    connections.serving.append(rollout("rollout-1"))
    publisher = make_publisher(connections)
    async with running(publisher):
        await trained(publisher, 1)
        await publisher.wait_served(1)
        connections.is_missing = {"rollout-1"}  # it still loads the version from a store
        await trained(publisher, 2)
        await publisher.wait_served(2)
        await publisher.wait_idle()
        assert connections.opened == [1, 1]
        connections.is_missing = set()
        await connections.on_late()
        assert connections.serving[1].weight_version == 102
        assert connections.opened == [1, 1, 2]


async def test_a_version_is_published_again_for_a_rollout_that_lacks_a_copy_of_it():
    connections = Collaborators()
    publisher = make_publisher(connections)
    async with running(publisher):
        await trained(publisher, 1)
        await publisher.wait_served(1)
        await publisher.wait_idle()
        connections.may_publish.clear()
        connections.is_lacking = True
        await connections.on_late()
        assert publisher.is_busy
        connections.may_publish.set()
        await publisher.wait_idle()
        assert connections.published == [101, 101]


async def test_a_rollout_that_joins_and_loads_for_long_needs_one_publication():
    connections = Collaborators()
    publisher = make_publisher(connections)
    async with running(publisher):
        await trained(publisher, 1)
        await publisher.wait_served(1)
        await publisher.wait_idle()
        connections.is_missing, connections.late = {"rollout-1"}, ("rollout-1",)
        await publisher.admit([rollout("rollout-1")])
        async with asyncio.timeout(10):
            await publisher.wait_idle()
        assert connections.published == [101, 101]
        connections.is_missing = set()
        await connections.on_late()
        await publisher.wait_all_serve()


async def test_a_rollout_that_leaves_before_it_serves_weights_is_not_waited_for():
    connections = Collaborators()
    publisher = make_publisher(connections)
    await publisher.record_served(0)
    connections.copied = 100
    await publisher.admit([rollout("rollout-1")])
    assert publisher.is_busy
    connections.serving.pop()
    await publisher.forget(["rollout-1"])
    assert not publisher.is_busy
    async with asyncio.timeout(10):
        await publisher.wait_all_serve()
