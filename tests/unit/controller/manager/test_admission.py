"""Admission of queued runs: start, waiting reasons, deadlines."""

import asyncio
import time

import pytest

from services.common.host import steady_time
from services.common.runspec.loader import canonical_json, parse_spec
from services.controller.manager.quotas import admit
from services.controller.rules.run_state import RunEvent, RunState
from services.controller.run.state.requests import resource_needs
from services.controller.settings import Limits
from services.controller.store.records import NewRun, Submission
from services.controller.store.runs import RunStore
from services.controller.store.tables import CHECKPOINTS, QUOTAS, RUNS
from tests.helpers.rest import EmptyQueue, client_of, named, open_manager

pytestmark = pytest.mark.postgresql

MANY = Limits(max_active_runs=16, max_queued_runs=16)


@pytest.fixture
def store(database):
    return RunStore(database)


def queue(store, number, *, replicas=1, project="default", priority=0, timeout_s=0.0) -> str:
    """Queues a run that needs one GPU for its trainer and one for each rollout."""
    spec = named(number)
    spec["rollout"] = {**spec["rollout"], "replicas": replicas}
    spec["limits"] = {"queue_timeout_s": timeout_s}
    run_id = f"run_{number:032x}"
    new = NewRun(
        run_id=run_id,
        name=f"run-{number}",
        spec_json=canonical_json(parse_spec(spec)),
        spec_digest="d",
        needs=resource_needs(parse_spec(spec)),
        project=project,
        priority=priority,
    )
    store.create(new)
    return run_id


def admitted(store, run_id):
    return next(c for c in store.get(run_id).conditions if c.type == "Admitted")


def test_gpus_bound_what_starts_and_nothing_overtakes_what_waits_for_them(store):
    limits = Limits(max_active_runs=16, max_queued_runs=16, max_gpus=5)
    first, large, small = queue(store, 0), queue(store, 1, replicas=3), queue(store, 2)
    other = queue(store, 3, project="other")
    done = admit(store, limits)
    assert [run.run_id for run in done.started] == [first, other]
    waits = admitted(store, large)
    assert (waits.status, waits.reason) == ("False", "GpuQuota")

    assert admitted(store, small).reason == "Queued"
    assert admit(store, limits).events == []
    store.apply(first, RunEvent.FAIL, reason="Test")
    assert [run.run_id for run in admit(store, limits).started] == [large]


def test_bytes_of_samples_bound_what_starts(store, database):
    row = {"project": "default", "max_active_runs": 9, "max_queued_runs": 9}
    with database.write() as connection:
        connection.execute(QUOTAS.insert().values(**row, max_transferqueue_bytes=6 << 30))
    started, waiting = queue(store, 0), queue(store, 1)
    assert [run.run_id for run in admit(store, MANY).started] == [started]
    assert admitted(store, waiting).reason == "TransferQueueQuota"


def test_checkpoints_over_their_quota_keep_further_runs_waiting(store, database):
    limits = Limits(max_active_runs=16, max_queued_runs=16, max_checkpoint_bytes=100)
    saving = queue(store, 0)
    assert [run.run_id for run in admit(store, limits).started] == [saving]
    keep_checkpoint(database, saving, "ckpt_1", step=1, size_bytes=99)
    keep_checkpoint(database, saving, "ckpt_2", step=2, size_bytes=500, state="DELETED")
    second, third = queue(store, 1), queue(store, 2)
    assert [run.run_id for run in admit(store, limits).started] == [second, third]
    keep_checkpoint(database, second, "ckpt_3", step=1, size_bytes=1)
    waiting = queue(store, 3)
    assert admit(store, limits).started == []
    assert admitted(store, waiting).reason == "CheckpointQuota"

    assert [run.run_id for run in admit(store, MANY).started] == [waiting]


def keep_checkpoint(database, run_id, checkpoint_id, *, step, size_bytes, state="READY"):
    with database.write() as connection:
        connection.execute(
            CHECKPOINTS.insert().values(
                checkpoint_id=checkpoint_id,
                run_id=run_id,
                step=step,
                weight_version=step,
                path="",
                state=state,
                message="",
                create_time=0.0,
                size_bytes=size_bytes,
            )
        )


async def test_a_waiting_run_starts_once_a_checkpoint_is_deleted(database, tmp_path):
    async with (
        open_manager(database, max_active_runs=2, max_checkpoint_bytes=10) as manager,
        client_of(manager, database, tmp_path) as api,
    ):
        first = (await api.post("/v1/runs", json=named(0))).json()["id"]
        for step in (1, 2):
            keep_checkpoint(database, first, f"ckpt_{step:016x}", step=step, size_bytes=6)
        second = (await api.post("/v1/runs", json=named(1))).json()
        assert second["state"] == "QUEUED"
        quota = (await api.get("/v1/quota")).json()
        assert (quota["checkpoint_bytes"], quota["max_checkpoint_bytes"]) == (12, 10)
        deleted = await api.delete(f"/v1/runs/{first}/checkpoints/ckpt_{1:016x}")
        assert deleted.status_code == 204
        async with asyncio.timeout(10):
            async for events in manager.feed.watch(second["id"], 0):
                if any(event.data.get("to") == "STARTING" for event in events):
                    break


def test_a_run_that_has_not_wholly_stopped_does_not_start_again(store):
    run_id = queue(store, 0)
    assert admit(store, MANY, busy=[run_id]).started == []
    assert [run.run_id for run in admit(store, MANY).started] == [run_id]


def test_a_run_that_waits_for_too_long_fails_with_what_it_waited_for(store):
    limits = Limits(max_active_runs=1, max_queued_runs=16)
    queue(store, 0)
    patient, hasty = queue(store, 1), queue(store, 2, timeout_s=60.0)
    deadline = admit(store, limits).next_deadline
    assert deadline == pytest.approx(time.time() + 60.0, abs=30.0)
    assert admit(store, limits, now=deadline - 1.0).expired == []
    done = admit(store, limits, now=deadline)
    assert [run.run_id for run in done.expired] == [hasty]
    assert done.next_deadline is None
    ended = store.get(hasty)
    assert (ended.state, ended.state_reason) == (RunState.FAILED, "QueueTimeout")
    assert store.get(patient).state is RunState.QUEUED


@pytest.mark.parametrize("jump_s", [-3 * 3600.0, 3 * 3600.0])
def test_a_clock_that_somebody_sets_neither_ends_nor_prolongs_a_wait(store, monkeypatch, jump_s):
    limits = Limits(max_active_runs=0, max_queued_runs=16)
    run_id = queue(store, 0, timeout_s=60.0)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    done = admit(store, limits)
    assert done.expired == []
    assert 0.0 < done.next_deadline - steady_time() <= 60.0
    assert [run.run_id for run in admit(store, limits, now=steady_time() + 60.0).expired] == [
        run_id
    ]


def test_a_wait_that_began_with_a_clock_ahead_lasts_no_longer_than_the_time_out(store):
    limits = Limits(max_active_runs=0, max_queued_runs=16)
    run_ids = queue(store, 0, timeout_s=60.0), queue(store, 1, timeout_s=0.0)
    with store.database.write() as connection:
        is_first = RUNS.c.run_id == run_ids[0]
        late = steady_time() + 7200.0
        connection.execute(RUNS.update().where(is_first).values(queue_deadline=late))
    for run_id in run_ids:
        store.limit_wait(store.get(run_id))
    assert admit(store, limits).next_deadline - steady_time() <= 60.0
    assert [run.run_id for run in admit(store, limits, now=late).expired] == [run_ids[0]]


async def test_a_run_that_is_submitted_after_the_clock_was_set_back_is_the_newest(
    manager, monkeypatch
):
    real = time.time_ns
    run_ids = []
    for number, jump_s in enumerate((0, -7200, -3600)):
        monkeypatch.setattr(time, "time_ns", lambda jump_s=jump_s: real() + jump_s * 10**9)
        spec = parse_spec(named(number))
        run, _ = await manager.create(Submission(spec=spec, project="default"))
        run_ids.append(run.run_id)
    assert run_ids == sorted(run_ids)


def test_the_queue_deadline_restarts_with_a_resume(store):
    run_id = queue(store, 0, timeout_s=60.0)
    for event in (RunEvent.PAUSE, RunEvent.RESUME):
        store.apply(run_id, event, reason="Test")
    before = time.time()
    limits = Limits(max_active_runs=0, max_queued_runs=16)
    assert admit(store, limits, now=before).next_deadline >= before + 30.0


async def test_a_run_larger_than_its_quota_is_refused_and_may_not_grow_beyond_it(
    database, tmp_path
):
    async with (
        open_manager(database, max_active_runs=2, max_gpus=6) as manager,
        client_of(manager, database, tmp_path) as api,
    ):
        spec = named(0)
        large = {**spec, "rollout": {**spec["rollout"], "replicas": 6}}
        refused = await api.post("/v1/runs", json=large)
        assert (refused.status_code, refused.json()["code"]) == (409, "quota_too_small")
        for number in (1, 2):
            created = await api.post("/v1/runs", json=named(number))
        used = (await api.get("/v1/quota")).json()
        assert (used["max_gpus"], used["gpus"], used["active_runs"]) == (6, 6, 2)
        headers = {"If-Match": created.headers["ETag"]}
        grown = await api.patch(
            created.headers["Location"], json={"rollout_replicas": 3}, headers=headers
        )
        assert (grown.status_code, grown.json()["code"]) == (429, "quota_exceeded")


async def test_the_controller_wakes_up_for_a_run_that_has_waited_for_too_long(database, tmp_path):
    async with (
        open_manager(database) as manager,
        client_of(manager, database, tmp_path) as api,
    ):
        await api.post("/v1/runs", json=named(0))
        waits = {**named(1), "limits": {"queue_timeout_s": 0.01}}
        path = (await api.post("/v1/runs", json=waits)).headers["Location"]
        await api.get(f"{path}/events/stream")
        run = (await api.get(path)).json()
        assert (run["state"], run["error"]["code"]) == ("FAILED", "QueueTimeout")
        assert run["error"]["category"] == "USER"


async def test_a_run_that_fails_in_the_moment_of_its_cancellation_is_cancelled(database, tmp_path):
    class Queue:
        def __init__(self):
            self.was_called, self.may_break = asyncio.Event(), asyncio.Event()

        async def stats(self):
            self.was_called.set()
            await self.may_break.wait()
            raise RuntimeError("broken")

        async def drop_partition(self, partition_id):
            """Does nothing."""

    breaking = Queue()
    async with (
        open_manager(database, queue=breaking) as manager,
        client_of(manager, database, tmp_path) as api,
    ):
        path = f"/v1/runs/{(await api.post('/v1/runs', json=named(0))).json()['id']}"
        await breaking.was_called.wait()
        store = RunStore(database)
        # The driver is notified after the database transaction.
        store.apply(path.rpartition("/")[2], RunEvent.CANCEL, reason="CancelledByUser")
        breaking.may_break.set()
        while (await api.get(path)).json()["state"] == "CANCELLING":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (await api.get(path)).json()["state"] == "CANCELLED"


async def test_samples_of_a_resumed_run_go_when_it_ends_in_the_queue(database, tmp_path):
    class Queue(EmptyQueue):
        def __init__(self):
            self.dropped = []

        async def drop_partition(self, partition_id):
            self.dropped.append(partition_id)

    dropping = Queue()
    async with (
        open_manager(database, queue=dropping) as manager,
        client_of(manager, database, tmp_path) as api,
    ):
        await api.post("/v1/runs", json=named(0))
        created = (await api.post("/v1/runs", json=named(1))).json()
        for action in ("pause", "resume", "cancel"):
            await api.post(f"/v1/runs/{created['id']}/{action}")
    assert f"{created['id']}/train" in dropping.dropped


async def test_a_run_that_is_admitted_while_the_controller_stops_is_stopped_with_the_others(
    database, tmp_path, monkeypatch
):
    is_admitted, run = asyncio.Event(), database.run

    async def slow_result(work, *args, **kwargs):
        done = await run(work, *args, **kwargs)
        if work is admit:
            is_admitted.set()
            await asyncio.sleep(0.1)
        return done

    monkeypatch.setattr(database, "run", slow_result)
    async with (
        asyncio.timeout(20),
        open_manager(database) as manager,
        client_of(manager, database, tmp_path) as api,
        asyncio.TaskGroup() as tasks,
    ):
        is_admitted.clear()
        submission = tasks.create_task(api.post("/v1/runs", json=named(0)))
        await is_admitted.wait()
        await manager.close(leave=False)
        assert (await submission).status_code == 201
        assert not manager.drivers.driven_runs()
