import asyncio
import dataclasses
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from services.common.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from services.controller import membership as membership_module
from services.controller.api.membership import MembershipServicer
from services.controller.membership import Membership, Worker
from services.controller.settings import ControllerSettings
from slipstream.controller.v1 import membership_pb2
from slipstream.type.v1 import worker_pb2


def worker(incarnation="a"):
    return Worker(
        run_id="run_1",
        worker_id="rollout-0",
        incarnation=incarnation,
        role="rollout",
        address="127.0.0.1:1",
        host_id="host",
        last_heartbeat=0.0,
    )


async def registered():
    membership = Membership(time, 30.0)
    membership.open_run("run_1")
    await membership.register(worker())
    return membership


async def record_heartbeat(membership, state, **gauges):
    return await membership.record_heartbeat(
        "run_1",
        "rollout-0",
        "a",
        state=state,
        activity="",
        weight_version=-1,
        gauges=gauges,
    )


async def until(membership, condition):
    await membership.wait_until(condition, timeout_s=lambda: 30.0, waiting_for=lambda: "it")


async def test_waiters_are_woken_when_a_worker_has_loaded():
    membership = await registered()
    waiting = asyncio.ensure_future(
        until(membership, lambda: membership.find("run_1", "rollout-0").state == "loaded")
    )
    await record_heartbeat(membership, "loading")
    assert await record_heartbeat(membership, "loaded") == "continue"
    await waiting


async def test_waiters_are_woken_when_a_worker_reports_its_data():
    membership = await registered()
    await record_heartbeat(membership, "loaded")
    waiting = asyncio.ensure_future(
        until(membership, lambda: "rows" in membership.find("run_1", "rollout-0").gauges)
    )
    await record_heartbeat(membership, "loaded", rows=4.0)
    await waiting


async def test_a_process_that_outlives_its_loss_stops_and_its_replacement_takes_no_place():
    membership = await registered()
    await membership.unregister("run_1", "rollout-0")
    assert await record_heartbeat(membership, "ready") == "stop"
    with pytest.raises(FailedPreconditionError):
        await membership.register(worker())
    assert not await membership.register(worker("b"))


async def test_heartbeats_without_news_wake_no_waiter():
    membership = await registered()
    await record_heartbeat(membership, "loading", tokens=1.0)
    tried = 0

    def condition():
        nonlocal tried
        tried += 1
        return membership.find("run_1", "rollout-0").state == "loaded"

    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(until(membership, condition))
        await asyncio.sleep(0)
        for number in range(10):
            await record_heartbeat(membership, "loading", tokens=float(number))
            await asyncio.sleep(0)
        assert not waiting.done()
        assert tried == 1
        await record_heartbeat(membership, "loaded", tokens=10.0)
    assert tried == 2


async def test_the_heartbeat_interval_grows_with_the_number_of_workers(tmp_path):
    membership = await registered()
    settings = ControllerSettings(
        transferqueue_address="127.0.0.1:1",
        state_directory=tmp_path,
        max_heartbeats_per_s=4.0,
        heartbeat_timeout_s=30.0,
    )
    servicer = MembershipServicer(None, membership, settings, time)

    async def interval_s() -> float:
        request = membership_pb2.HeartbeatRequest(
            run_id="run_1",
            worker_id="rollout-0",
            incarnation="a",
            state=worker_pb2.WORKER_STATE_LOADED,
        )
        return (await servicer.Heartbeat(request, None)).heartbeat_interval_s

    intervals_s = [await interval_s()]
    for more in (19, 1000):
        for number in range(more):
            name = f"rollout-{more}-{number}"
            await membership.register(dataclasses.replace(worker(), worker_id=name))
        intervals_s.append(await interval_s())
    assert intervals_s == [1.0, 5.0, 7.5]


async def test_events_of_workers_are_recorded_once_and_only_known_types(tmp_path):
    membership = await registered()
    settings = ControllerSettings(
        transferqueue_address="127.0.0.1:1", state_directory=tmp_path, heartbeat_timeout_s=30.0
    )
    recorded = []

    async def worker_reported(worker, *event, step, key):
        if fails:
            raise UnavailableError("the database is locked")
        recorded.append((worker.worker_id, worker.state, *event, step, key))

    drivers = SimpleNamespace(
        find=lambda run_id: None,
        worker_reported=worker_reported,
        tasks=SimpleNamespace(create_task=asyncio.ensure_future),
    )
    servicer = MembershipServicer(SimpleNamespace(drivers=drivers), membership, settings, time)
    events = [
        membership_pb2.WorkerEvent(number=1, type="EngineServerLost", message="a" * 5000),
        membership_pb2.WorkerEvent(number=2, type="StepCommitted", message="not its own"),
        membership_pb2.WorkerEvent(number=3, type="EngineServerServes", message="b"),
        membership_pb2.WorkerEvent(number=4, type="CheckpointUploaded", step=5, key="upload_1"),
    ]
    for fails, reported_events in (
        (True, events[:1]),
        (False, events[:1]),
        (False, events),
        (False, events),
    ):
        request = membership_pb2.HeartbeatRequest(
            run_id="run_1",
            worker_id="rollout-0",
            incarnation="a",
            state=worker_pb2.WORKER_STATE_READY,
            events=reported_events,
        )
        with pytest.raises(UnavailableError) if fails else nullcontext():
            await servicer.Heartbeat(request, None)
    assert recorded == [
        # Before the run learns that the worker is ready.
        ("rollout-0", "loading", "EngineServerLost", "a" * 2048, 0, ""),
        ("rollout-0", "ready", "EngineServerServes", "b", 0, ""),
        ("rollout-0", "ready", "CheckpointUploaded", "", 5, "upload_1"),
    ]


class Watch:
    def __init__(self):
        self.now = 0.0

    def time(self):
        return self.now

    def monotonic(self):
        return self.now


async def test_a_silent_worker_is_named_but_not_by_a_controller_that_stood_still():
    clock = Watch()
    membership = Membership(clock, 30.0)
    membership.open_run("run_1")
    membership.start_supervision("run_1")
    await membership.register(worker())

    clock.now = 15.0
    assert membership.find_silent("run_1") == []
    # the controller was stopped, as by SIGSTOP, and could receive no heartbeat
    clock.now = 15.0 + 40.0
    assert membership.find_silent("run_1") == []
    clock.now = 55.0 + 15.0
    assert membership.find_silent("run_1") == []
    clock.now = 70.0 + 16.0
    assert [worker.worker_id for worker in membership.find_silent("run_1")] == ["rollout-0"]


async def test_a_restarted_watch_is_not_a_pause():
    clock = Watch()
    membership = Membership(clock, 30.0)
    membership.open_run("run_1")
    membership.start_supervision("run_1")
    await membership.register(worker())
    clock.now = 14.0  # the loss of another worker restarts supervision just before the next check
    membership.start_supervision("run_1")
    clock.now = 14.0 + 15.0
    assert membership.find_silent("run_1") == []
    clock.now = 29.0 + 2.0
    assert [worker.worker_id for worker in membership.find_silent("run_1")] == ["rollout-0"]


async def test_the_workers_of_one_run_cannot_fill_the_memory(monkeypatch):
    monkeypatch.setattr(membership_module, "MAX_WORKERS", 3)
    monkeypatch.setattr(membership_module, "MAX_GAUGES", 10)
    membership = await registered()
    for number in (1, 2):
        await membership.register(dataclasses.replace(worker(), worker_id=f"rollout-{number}"))
    with pytest.raises(ResourceExhaustedError):
        await membership.register(dataclasses.replace(worker(), worker_id="rollout-3"))
    await membership.register(worker("b"))  # a registered worker may be replaced
    with pytest.raises(InvalidArgumentError):
        await membership.register(dataclasses.replace(worker(), address="a" * 10_000))
    membership = await registered()
    with pytest.raises(ResourceExhaustedError):
        await record_heartbeat(membership, "ready", **{f"gauge{i}": 1.0 for i in range(11)})
    with pytest.raises(ResourceExhaustedError):
        await record_heartbeat(membership, "ready", **{"a" * 300: 1.0})
    assert await record_heartbeat(membership, "ready", running_samples=1.0) == "continue"
    # the number of gauges is unchanged, but the name is too long
    with pytest.raises(ResourceExhaustedError):
        await record_heartbeat(membership, "ready", **{"a" * 300: 1.0})
    assert await record_heartbeat(membership, "ready") == "continue"


async def test_the_phases_of_a_start_are_timed_until_the_worker_has_loaded():
    clock = Watch()
    membership = Membership(clock, 30.0)
    membership.open_run("run_1")
    clock.now = 5.0
    await membership.register(worker())

    async def beat(now: float, state: str, activity: str) -> None:
        clock.now = now
        await membership.record_heartbeat(
            "run_1",
            "rollout-0",
            worker().incarnation,
            state=state,
            activity=activity,
            weight_version=-1,
            gauges={},
        )

    await beat(6.0, "loading", "warm start: step 20 of 100")
    await beat(8.0, "loading", "warm start: step 40 of 100")
    await beat(9.0, "loading", "")
    await beat(10.0, "loading", "starting the engine")
    await beat(30.0, "loaded", "")
    await beat(40.0, "loading", "the reason of a refused version")
    registered = membership.find("run_1", "rollout-0")
    assert registered.start_seconds() == {
        "imports": 5.0,
        "registered": 1.0,
        "warm start": 4.0,
        "starting the engine": 20.0,
    }
