"""Tests that changed keys reach every process of a running run, and that reports of workers reach the run."""

import asyncio
import time
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace

import pytest

from services.common.rpc.server import serve
from services.controller.api.membership import MembershipServicer
from services.controller.schemas import RunPatch
from services.controller.settings import ControllerSettings
from services.controller.store.records import EventFilter
from services.rollout.engines.base import EngineStats
from services.rollout.monitor import EngineStalledError, monitor
from services.trainer.settings import TrainerSettings
from services.wire.controller import WorkerSession
from slipstream.controller.v1 import membership_pb2_grpc
from tests.helpers.rest import open_manager
from tests.unit.controller.run.test_live_changes import ended, patched, submitted
from tests.unit.controller.workers import MemoryQueue, Workers

LIVE = {
    "queue_timeout_s": (RunPatch(limits={"queue_timeout_s": 71.0}), lambda spec: spec.limits),
    "start_timeout_s": (RunPatch(limits={"start_timeout_s": 72.0}), lambda spec: spec.limits),
    "step_timeout_s": (RunPatch(limits={"step_timeout_s": 73.0}), lambda spec: spec.limits),
    "stall_timeout_s": (RunPatch(limits={"stall_timeout_s": 74.0}), lambda spec: spec.limits),
    "max_restarts": (RunPatch(limits={"max_restarts": 75}), lambda spec: spec.limits),
    "validation.every": (RunPatch(validation_every=76), lambda spec: spec.validation),
    "checkpoint.every": (RunPatch(checkpoint_every=77), lambda spec: spec.trainer.checkpoint),
    "replicas": (RunPatch(rollout_replicas=3), lambda spec: spec.rollout),
}


@pytest.fixture
def workers(monkeypatch) -> Workers:
    workers = Workers(MemoryQueue())
    workers.may_train.clear()
    monkeypatch.setattr("services.controller.run.lifecycle.loop.connect", workers.assemble)
    return workers


@asynccontextmanager
async def running(database, workers, tmp_path):
    """Yields a manager, the id of a run that trains, and the session of one of its workers."""
    async with open_manager(database, queue=workers.queue) as manager:
        membership = manager.drivers.services.membership
        settings = ControllerSettings(transferqueue_address="127.0.0.1:1", state_directory=tmp_path)
        servicer = MembershipServicer(manager, membership, settings, time)

        def register(server):
            membership_pb2_grpc.add_MembershipServiceServicer_to_server(servicer, server)

        run_id = await submitted(manager)
        async with asyncio.timeout(20):
            await workers.trains.wait()
        async with serve("127.0.0.1:0", register) as port:
            trainer_settings = TrainerSettings(
                controller_address=f"127.0.0.1:{port}",
                run_id=run_id,
                worker_id="rollout-1",
                bind="127.0.0.1:0",
                advertise_host="127.0.0.1",
                state_directory=tmp_path,
            )
            async with WorkerSession(trainer_settings, role="rollout", port=1) as session:
                yield manager, run_id, session
        workers.may_train.set()
        if manager.drivers.find(run_id) is not None:
            await ended(manager, run_id)


async def changed(session, value_of, *, to):
    """Sends heartbeats until the session's specification has the value ``to``."""
    async with asyncio.timeout(20):
        while value_of(session.spec) != to:
            session.report(activity="")
            await asyncio.sleep(0)


async def test_a_changed_key_reaches_a_worker_with_a_heartbeat(database, workers, tmp_path):
    async with running(database, workers, tmp_path) as (manager, run_id, session):
        for key, (patch, part_of) in LIVE.items():
            value_of = partial(_value, part_of=part_of, name=key.rpartition(".")[2])
            before = session.spec
            await patched(manager, run_id, patch)
            now = manager.drivers.running(await manager.get(run_id)).spec
            assert value_of(before) != value_of(now), key
            await changed(session, value_of, to=value_of(now))
            assert session.spec == now


def _value(spec, *, part_of, name):
    return getattr(part_of(spec), name)


async def test_a_rollout_finds_a_dead_engine_under_the_limit_that_holds_now(
    database, workers, tmp_path, monkeypatch
):
    monkeypatch.setattr("services.rollout.monitor._EVERY_S", 0.05)
    stats = EngineStats(
        num_running=1,
        num_waiting=0,
        tokens_total=5,
        kv_used_fraction=0.0,
        idle_seconds=0.0,
        weight_version=0,
    )
    admission = SimpleNamespace(adapt=nothing, limit=1)
    sampler = SimpleNamespace(
        num_prompts=dict, admission=admission, stop_stalled=nothing, checkpoint_soon=list
    )
    async with running(database, workers, tmp_path) as (manager, run_id, session):
        watching = asyncio.create_task(
            monitor(
                session, SimpleNamespace(stats=lambda: stats), sampler, publish_wait_s=lambda: 0.0
            )
        )
        await patched(manager, run_id, RunPatch(limits={"stall_timeout_s": 0.01}))
        with pytest.raises(EngineStalledError):
            async with asyncio.timeout(20):
                await watching


async def test_the_failure_that_a_worker_reports_is_the_cause_of_its_loss(
    database, workers, tmp_path
):
    async with running(database, workers, tmp_path) as (manager, run_id, session):
        workers.connects.clear()
        await session.report_own_failure("its engine stalled")
        # from a task of the worker that is still running
        session.report(state="ready", activity="")
        async with asyncio.timeout(20):
            await workers.connects.wait()
        (loss_event,) = await manager.feed.page(
            run_id, after_seq=0, only=EventFilter(types=("WorkerLost",))
        )
        assert loss_event.message.startswith("rollout-1 failed: its engine stalled (log: ")


async def test_a_failure_that_each_start_would_repeat_ends_the_run(database, workers, tmp_path):
    async with running(database, workers, tmp_path) as (manager, run_id, session):
        await session.report_own_failure("its checkpoint is damaged", code="CheckpointUnusable")
        async with asyncio.timeout(20):
            await manager.drivers.wait()
        run = await manager.get(run_id)
        assert (run.state, run.state_reason) == ("FAILED", "CheckpointUnusable")
        assert run.message.startswith("rollout-1 failed: its checkpoint is damaged (log: ")


async def nothing(*arguments, **keywords):
    """Does nothing."""


async def test_who_waits_for_workers_waits_until_the_time_out_that_holds_now(database, workers):
    async with open_manager(database, queue=workers.queue) as manager:
        membership, limit_s = manager.drivers.services.membership, 3600.0
        waiting = asyncio.create_task(
            membership.wait_until(
                lambda: False, timeout_s=lambda: limit_s, waiting_for=lambda: "trainer-0 to load"
            )
        )
        await asyncio.sleep(0)
        limit_s = 0.0
        await membership.recheck()
        with pytest.raises(Exception, match="trainer-0 to load"):
            async with asyncio.timeout(20):
                await waiting


async def test_a_worker_that_leaves_is_not_ready_again_after_a_weight_version(
    database, workers, tmp_path
):
    async with running(database, workers, tmp_path) as (manager, run_id, session):
        session.report(state="draining", activity="ending")
        session.report(state="ready", activity="", weight_version=5)
        async with asyncio.timeout(20):
            while not (rows := manager.workers(run_id)) or rows[-1].weight_version != 5:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (rows[-1].worker_id, rows[-1].state) == ("rollout-1", "draining")
