"""Tests that workers leave drained hosts after a checkpoint, and that the run trains each step once."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from services.common.errors import DeadlineExceededError, FailedPreconditionError
from services.controller.launch.launcher import ExternalLauncher, WorkerExit
from services.controller.run.lifecycle.drains import DrainedHost
from services.controller.run.pipeline import TrainingPipeline
from services.controller.store.records import EventFilter, Submission
from tests.helpers.rest import open_manager
from tests.unit.controller.workers import MemoryQueue, Workers, rollout_of, specification

HOST = DrainedHost(name="node-1", reason="cordoned", since=5.0)


class Drained:
    """Launcher whose hosts are drained."""

    def __init__(self, workers: Workers, monkeypatch) -> None:
        self.released: list[list[str]] = []
        self.steps_saved: list[list[int]] = []
        self.why_volatile = ""

        async def release(launcher, run_id, worker_ids):
            self.released.append(sorted(worker_ids))
            self.steps_saved.append([*workers.saved])

        async def why_volatile(launcher, run_id, folder):
            return self.why_volatile

        monkeypatch.setattr(ExternalLauncher, "release", release)
        monkeypatch.setattr(ExternalLauncher, "why_volatile", why_volatile)


@pytest.fixture
def workers(monkeypatch) -> Workers:
    workers = Workers(MemoryQueue())
    monkeypatch.setattr("services.controller.run.lifecycle.loop.connect", workers.assemble)
    workers.held_from = 2
    workers.may_train.clear()
    return workers


@pytest.fixture
def hosts(workers, monkeypatch) -> Drained:
    return Drained(workers, monkeypatch)


async def events(manager, run_id, *types):
    return await manager.feed.page(run_id, after_seq=0, only=EventFilter(types=types))


async def reported(manager, run_id, type_):
    """Waits for the first event of a type."""
    async for batch in manager.feed.watch(run_id, 0):
        for event in batch:
            if event.type == type_:
                return event
    raise AssertionError(f"the run ended without {type_}")


def condition(run, type_):
    return next(condition for condition in run.conditions if condition.type == type_)


async def register_trainer(manager, run_id):
    """Registers a trainer that has loaded, on the drained host."""
    worker = rollout_of(run_id, 0)
    worker.worker_id, worker.role = "trainer-0", "trainer"
    await manager.drivers.services.membership.register(worker)


@asynccontextmanager
async def drained_run(database, workers, spec=None):
    """Yields a manager and its run, whose trainer's host is drained during a step."""
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(20):
        run_id = (await manager.create(Submission(spec=spec or specification())))[0].run_id
        await workers.trains.wait()
        await register_trainer(manager, run_id)
        manager.drivers.host_drained(run_id, HOST, {"trainer-0"})
        yield manager, run_id


@asynccontextmanager
async def drained_after_restart(database, workers):
    """Yields a new manager and its run, whose trainer it has not heard of when its host is drained."""
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(20):
        run_id = (await manager.create(Submission(spec=specification())))[0].run_id
        await workers.trains.wait()
        manager.drivers.detach()
        await manager.drivers.wait()
    workers.connects.clear()
    workers.may_connect.clear()
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(20):
        await workers.connects.wait()
        manager.drivers.host_drained(run_id, HOST, {"trainer-0"})
        for _ in range(20):
            await asyncio.sleep(0)
        yield manager, run_id


async def test_a_trainer_leaves_after_its_step_is_saved_and_no_step_is_lost(
    database, workers, hosts
):
    async with drained_run(database, workers) as (manager, run_id):
        draining = await reported(manager, run_id, "Draining")
        run = await manager.get(run_id)
        drain_condition = condition(run, "Draining")
        assert (run.state, drain_condition.status, drain_condition.reason) == (
            "RUNNING",
            "True",
            "HostDrained",
        )
        assert draining.data == {
            "reason": "HostDrained",
            "hosts": [{"name": "node-1", "reason": "cordoned", "since": 5.0}],
            "workers": ["trainer-0"],
        }
        assert hosts.released == [], "the step in progress ends first"
        workers.may_train.set()
        drained = await reported(manager, run_id, "Drained")
        assert drained.data["hosts"] == ["node-1"]
        await manager.drivers.wait()
        run = await manager.get(run_id)
    assert (hosts.released, hosts.steps_saved) == ([["trainer-0"]], [[2]])
    assert (run.state, run.step) == ("SUCCEEDED", 4)
    assert condition(run, "Draining").status == "False"
    steps = [event.data["step"] for event in await events(manager, run_id, "StepCommitted")]
    assert steps == [1, 2, 3, 4]
    assert await events(manager, run_id, "Rewound", "WorkerLost") == []
    moves = await events(manager, run_id, "StateChanged")
    assert [event.data["to"] for event in moves if event.data["reason"] == "HostDrained"] == [
        "RECOVERING"
    ]


async def test_a_trainer_stays_while_its_checkpoints_would_be_lost_with_it(
    database, workers, hosts
):
    hosts.why_volatile = "/var/lib/slipstream is a volume of the pod (emptyDir)"
    async with drained_run(database, workers) as (manager, run_id):
        event = await reported(manager, run_id, "Draining")
        assert event.data["reason"] == "CheckpointsVolatile"
        assert "emptyDir" in event.message
        manager.drivers.host_drained(run_id, HOST, {"trainer-0"})
        workers.may_train.set()
        await manager.drivers.wait()
        assert (await manager.get(run_id)).state == "SUCCEEDED"
    assert hosts.released == []
    assert len(await events(manager, run_id, "Draining")) == 1, "repetitions tell nothing new"


async def test_a_failed_checkpoint_keeps_the_trainer_until_the_next_notice(
    database, workers, hosts, monkeypatch
):
    save, fails = workers.save_checkpoint, True

    async def saves(step, **options):
        if fails:
            raise FailedPreconditionError("no space left")
        return await save(step, **options)

    monkeypatch.setattr(workers, "save_checkpoint", saves)
    async with drained_run(database, workers) as (manager, run_id):
        await reported(manager, run_id, "Draining")
        workers.held_from = 3
        workers.may_train.set()
        await reported(manager, run_id, "CheckpointFailed")
        workers.may_train.clear()
        await workers.trains.wait()
        draining = (await events(manager, run_id, "Draining"))[-1]
        assert draining.data["reason"] == "CheckpointFailed"
        assert hosts.released == []
        fails = False
        manager.drivers.host_drained(run_id, HOST, {"trainer-0"})
        workers.may_train.set()
        await manager.drivers.wait()
        assert (await manager.get(run_id)).state == "SUCCEEDED"
    assert (hosts.released, hosts.steps_saved) == ([["trainer-0"]], [[3]])


async def test_the_workers_of_a_host_that_is_in_service_again_stay(database, workers, hosts):
    async with drained_run(database, workers) as (manager, run_id):
        await reported(manager, run_id, "Draining")
        manager.drivers.host_in_service("node-1")
        event = await reported(manager, run_id, "Drained")
        assert event.data["reason"] == "InService"
        workers.may_train.set()
        await manager.drivers.wait()
        assert (await manager.get(run_id)).state == "SUCCEEDED"
    assert hosts.released == []


async def test_a_worker_that_is_lost_on_a_drained_host_has_left_it(database, workers, hosts):
    hosts.why_volatile = "/var/lib/slipstream is a volume of the pod (emptyDir)"
    async with drained_run(database, workers) as (manager, run_id):
        await reported(manager, run_id, "Draining")
        hosts.why_volatile = ""
        worker_exit = WorkerExit(run_id=run_id, worker_id="trainer-0", code=-9, last_lines="")
        manager.drivers.worker_exited(worker_exit)
        drained = await reported(manager, run_id, "Drained")
        assert (drained.data["hosts"], drained.data["workers"]) == (["node-1"], ["trainer-0"])
        workers.may_train.set()
        await manager.drivers.wait()
        run = await manager.get(run_id)
    assert (run.state, condition(run, "Draining").status) == ("SUCCEEDED", "False")
    assert hosts.released == [], "its replacement is on another host"


async def test_a_host_that_is_in_service_before_the_loops_are_entered_is_not_drained_again(
    database, workers, hosts
):
    async with drained_after_restart(database, workers) as (manager, run_id):
        manager.drivers.host_in_service("node-1")
        await reported(manager, run_id, "Drained")
        workers.may_connect.set()
        workers.may_train.set()
        await manager.drivers.wait()
        run = await manager.get(run_id)
        assert run.state == "SUCCEEDED"
        assert await events(manager, run_id, "Draining") == [], "no worker had to leave"


async def test_a_trainer_stays_while_the_object_store_lacks_its_checkpoint(
    database, workers, hosts, monkeypatch
):
    fails = True

    async def await_uploads(**options):
        if fails:
            raise DeadlineExceededError("the store does not answer")

    monkeypatch.setattr(workers, "await_uploads", await_uploads)
    monkeypatch.setattr("services.controller.run.pipeline.is_url", lambda text: True)
    monkeypatch.setattr(TrainingPipeline, "_upload_reports", lambda pipeline: ())
    checkpoint = {"directory": "/checkpoints"}
    spec = specification(trainer={"steps": 4, "prompts_per_step": 2, "checkpoint": checkpoint})
    async with drained_run(database, workers, spec) as (manager, run_id):
        await reported(manager, run_id, "Draining")
        workers.held_from = 3
        workers.may_train.set()
        await reported(manager, run_id, "CheckpointNotUploaded")
        workers.may_train.clear()
        await workers.trains.wait()
        draining = (await events(manager, run_id, "Draining"))[-1]
        assert draining.data["reason"] == "CheckpointFailed"
        assert hosts.released == []
        fails = False
        manager.drivers.host_drained(run_id, HOST, {"trainer-0"})
        workers.may_train.set()
        await manager.drivers.wait()
        assert (await manager.get(run_id)).state == "SUCCEEDED"
    assert hosts.released == [["trainer-0"]]


async def test_workers_that_still_load_leave_at_once(database, workers, hosts):
    workers.may_connect.clear()
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(20):
        run_id = (await manager.create(Submission(spec=specification())))[0].run_id
        await workers.connects.wait()
        manager.drivers.host_drained(run_id, HOST, {"trainer-0"})
        await reported(manager, run_id, "Drained")
        workers.may_connect.set()
        workers.may_train.set()
        await manager.drivers.wait()
        run = await manager.get(run_id)
    assert (hosts.released, hosts.steps_saved) == ([["trainer-0"]], [[]])
    assert (run.state, run.step) == ("SUCCEEDED", 4)


async def test_a_pause_during_a_drain_pauses_the_run(database, workers, hosts):
    async with drained_run(database, workers) as (manager, run_id):
        await reported(manager, run_id, "Draining")
        await manager.pause(run_id)
        workers.may_train.set()
        await manager.drivers.wait()
        run = await manager.get(run_id)
        assert (run.state, run.step) == ("PAUSED", 2)
        assert condition(run, "Draining").status == "False"
    assert hosts.released == [], "the pause ends all workers"


async def test_a_trainer_that_has_not_registered_at_a_new_controller_stays_until_its_step_is_saved(
    database, workers, hosts
):
    async with drained_after_restart(database, workers) as (manager, run_id):
        assert hosts.released == [], "it may know a step that nobody saved"
        await register_trainer(manager, run_id)
        workers.may_connect.set()
        workers.may_train.set()
        await manager.drivers.wait()
        run = await manager.get(run_id)
    assert hosts.released == [["trainer-0"]]
    assert hosts.steps_saved[0] != [], "its step was saved first"
    assert (run.state, run.step) == ("SUCCEEDED", 4)
    assert await events(manager, run_id, "Rewound") == []


async def test_workers_leave_another_host_while_a_moved_worker_is_unschedulable(
    database, workers, hosts, monkeypatch
):
    has_room, waits = asyncio.Event(), asyncio.Event()

    async def start(launcher, run_id, spec, *, later=()):
        if hosts.released:
            waits.set()
            await has_room.wait()

    monkeypatch.setattr(ExternalLauncher, "start", start)
    async with drained_run(database, workers) as (manager, run_id):
        workers.may_train.set()
        await waits.wait()
        other = DrainedHost(name="node-2", reason="cordoned", since=6.0)
        manager.drivers.host_drained(run_id, other, {"rollout-0"})
        async for batch in manager.feed.watch(run_id, 0):
            if any(e.type == "Drained" and e.data["hosts"] == ["node-2"] for e in batch):
                break
        assert hosts.released == [["trainer-0"], ["rollout-0"]]
        has_room.set()
        await manager.drivers.wait()
        run = await manager.get(run_id)
    assert (run.state, run.step) == ("SUCCEEDED", 4)
