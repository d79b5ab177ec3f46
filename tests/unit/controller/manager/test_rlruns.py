"""RLRun objects and their runs, with an API server in memory and a manager without workers."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.client import ApiException

from services.common.errors import UnavailableError
from services.controller.launch.launcher import ExternalLauncher
from services.controller.manager.runs import RunManager
from services.controller.rules.run_state import RunState
from services.controller.schemas import RunPatch
from services.controller.store.records import Note, Run, RunFilter
from services.controller.store.tables import RUNS
from services.extras.kubernetes.rlruns import (
    ACTOR,
    FINALIZER,
    RESUBMIT,
    Change,
    RLRuns,
    WriteBudget,
    _remaining_s,
    status_of,
)
from tests.helpers.rest import SPEC, open_manager
from tests.helpers.rlruns import FakeRLRuns

BLUE, GREEN = "blue", "green"
_SPEC = {key: value for key, value in SPEC.items() if key != "name"}


def changed(**sections: Any) -> dict[str, Any]:
    """Returns the specification with the given keys of sections, or whole sections, replaced."""
    spec = json.loads(json.dumps(_SPEC))
    for name, value in sections.items():
        spec[name] = {**spec.get(name, {}), **value} if isinstance(value, dict) else value
    return spec


class Stopping(ExternalLauncher):
    """Launcher that stores which runs it stopped."""

    def __init__(self) -> None:
        self.stopped: list[str] = []

    async def stop(self, run_id: str) -> None:
        self.stopped.append(run_id)


@pytest.fixture
def api() -> FakeRLRuns:
    return FakeRLRuns()


@asynccontextmanager
async def serving(
    manager: RunManager, api: FakeRLRuns, *namespaces: str
) -> AsyncIterator[RunManager]:
    """Serves the objects of the given namespaces until the block ends."""
    async with asyncio.TaskGroup() as tasks:
        some = [
            tasks.create_task(RLRuns(manager, api, api, namespace).serve())  # type: ignore[arg-type]
            for namespace in namespaces or (BLUE,)
        ]
        try:
            yield manager
        finally:
            for task in some:
                task.cancel()


@pytest.fixture
async def manager(database, api) -> AsyncIterator[RunManager]:
    """Yields a manager that serves the objects of one namespace; one run starts, the others queue."""
    async with open_manager(database, max_queued_runs=9) as opened, serving(opened, api):
        yield opened


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(15):
        while not condition():  # noqa: ASYNC110  the fake API server has no event
            await asyncio.sleep(0.01)


async def reached(
    api: FakeRLRuns, name: str, *phases: str, namespace: str = BLUE
) -> dict[str, Any]:
    """Waits until an object has one of the phases for its newest generation, and returns its status."""

    def status() -> dict[str, Any]:
        body = api.get(namespace, name) or {}
        status = body.get("status", {})
        is_current = status.get("observedGeneration") == body.get("metadata", {}).get("generation")
        return status if is_current and status.get("phase") in phases else {}

    await until(status)
    return status()


def rejection(status: dict[str, Any]) -> tuple[str, str, str]:
    """Returns the status, reason and message of the condition SpecRejected."""
    (spec_rejected,) = [
        condition for condition in status["conditions"] if condition["type"] == "SpecRejected"
    ]
    return spec_rejected["status"], spec_rejected["reason"], spec_rejected.get("message", "")


async def runs_of(manager: RunManager, project: str = BLUE) -> list[Run]:
    listed = await manager.list_runs(limit=100, only=RunFilter(project=project))
    return [await manager.get(run.run_id) for run in listed]


async def test_an_object_is_a_run_of_the_project_of_its_namespace(manager, api) -> None:
    api.apply(BLUE, "one", changed(priority=3, labels={"team": "rl"}))
    status = await reached(api, "one", "Starting")
    (run,) = await runs_of(manager)
    assert (run.name, run.priority, run.created_by) == ("one", 3, ACTOR)
    assert run.labels["team"] == "rl"
    assert (status["runId"], status["step"], status["targetSteps"]) == (run.run_id, 0, 3)
    assert {condition["type"] for condition in status["conditions"]} >= {
        "Admitted",
        "Placed",
        "SpecRejected",
    }
    assert rejection(status)[0] == "False"
    assert api.get(BLUE, "one")["metadata"]["finalizers"] == [FINALIZER]
    await until(lambda: [event[:2] for event in api.events] == [("one", "Starting")])


async def test_progress_of_the_run_is_the_status_of_the_object(manager, api) -> None:
    api.apply(BLUE, "one", changed())
    run_id = (await reached(api, "one", "Starting"))["runId"]
    summary = {
        "heldout": {"greedy": 0.5, "sampled": 0.24999999},
        "best": {"score": 0.5},
        "staleness": {"max": 1, "mean": 0.5, "bound": 1},
        "sync_ms": {"p50": 120.0, "p95": 200.0},
    }
    note = Note("StepCommitted", "step 2", {}, 2, 1, summary)
    await manager.add_event(await manager.get(run_id), note)
    await until(lambda: api.get(BLUE, "one")["status"]["step"] == 2)
    status = api.get(BLUE, "one")["status"]
    assert status["scores"] == {"greedy": 0.5, "sampled": 0.25, "best": 0.5}
    assert status["staleness"] == {"max": 1, "mean": 0.5, "bound": 1}
    assert (status["weightVersion"], status["syncSeconds"]) == (1, 0.12)


async def test_a_return_to_an_older_checkpoint_is_a_warning_of_the_object(manager, api) -> None:
    api.apply(BLUE, "one", changed())
    run_id = (await reached(api, "one", "Starting"))["runId"]
    run = await manager.get(run_id)
    await manager.add_event(run, Note("Rewound", "back to step 0", {"step": 0}, 0))
    await until(lambda: ("one", "Rewound", "back to step 0") in api.events)
    assert api.warnings == ["Rewound"]


async def test_an_invalid_spec_is_a_condition_until_it_is_corrected(manager, api) -> None:
    api.apply(BLUE, "one", changed(trainer={"stepz": 3}))
    status = await reached(api, "one", "Rejected")
    assert rejection(status)[:2] == ("True", "INVALID_SPEC")
    assert "trainer.stepz" in rejection(status)[2]
    assert await runs_of(manager) == []
    await until(lambda: [event[:2] for event in api.events] == [("one", "Rejected")])
    api.apply(BLUE, "one", changed())
    status = await reached(api, "one", "Starting")
    assert rejection(status)[0] == "False"


async def test_a_refusal_that_passes_is_tried_again(manager, api) -> None:
    api.apply(BLUE, "one", changed())
    run_id = (await reached(api, "one", "Starting"))["runId"]
    api.apply(BLUE, "two", changed(name="one"))
    assert rejection(await reached(api, "two", "Rejected"))[1] == "NAME_TAKEN"
    await manager.cancel(run_id)
    await reached(api, "one", "Cancelled")
    api.apply(BLUE, "two", changed(name="one", priority=1))
    assert rejection(await reached(api, "two", "Starting"))[0] == "False"


async def test_an_edit_changes_what_a_patch_may_change(manager, api) -> None:
    api.apply(BLUE, "one", changed())
    await reached(api, "one", "Starting")
    edited = changed(
        limits={"max_restarts": 7},
        validation={"every": 3},
        trainer={"checkpoint": {"every": 4}},
        rollout={"replicas": 3},
        priority=5,
        labels={"team": "rl"},
    )
    api.apply(BLUE, "one", edited)
    status = await reached(api, "one", "Starting")
    assert rejection(status)[0] == "False"
    (run,) = await runs_of(manager)
    spec = json.loads(run.spec_json)
    assert spec["limits"]["max_restarts"] == 7
    assert spec["validation"]["every"] == 3
    assert spec["trainer"]["checkpoint"]["every"] == 4
    assert spec["rollout"]["replicas"] == 3
    assert (run.priority, run.labels["team"]) == (5, "rl")


async def test_an_edit_of_another_key_is_refused_as_a_whole(manager, api) -> None:
    api.apply(BLUE, "one", changed())
    before = (await reached(api, "one", "Starting"))["runId"]
    api.apply(BLUE, "one", changed(trainer={"steps": 9}, validation={"every": 3}))
    status = await reached(api, "one", "Starting")
    assert rejection(status)[:2] == ("True", "NOT_EDITABLE")
    assert "trainer.steps" in rejection(status)[2]
    assert "validation" not in rejection(status)[2]
    spec = json.loads((await manager.get(before)).spec_json)
    assert (spec["trainer"]["steps"], spec["validation"]["every"]) != (9, 3)
    await until(lambda: api.events[-1][:2] == ("one", "Rejected"))
    api.apply(BLUE, "one", changed())
    assert rejection(await reached(api, "one", "Starting"))[0] == "False"


async def test_a_change_over_the_api_stays_until_the_next_edit(manager, api) -> None:
    api.apply(BLUE, "one", changed(validation={"every": 3}))
    run_id = (await reached(api, "one", "Starting"))["runId"]
    run = await manager.get(run_id)
    await manager.patch(run_id, RunPatch(validation_every=8), revision=run.revision)

    async def every() -> int:
        return json.loads((await manager.get(run_id)).spec_json)["validation"]["every"]

    await asyncio.sleep(0.2)
    assert await every() == 8
    api.apply(BLUE, "one", changed(validation={"every": 3}, priority=1))
    await reached(api, "one", "Starting")
    assert await every() == 3


async def test_suspension_pauses_and_resumes(manager, api) -> None:
    api.apply(BLUE, "first", changed())
    await reached(api, "first", "Starting")
    api.apply(BLUE, "two", changed())
    run_id = (await reached(api, "two", "Queued"))["runId"]
    api.apply(BLUE, "two", changed(suspend=True))
    await reached(api, "two", "Paused")
    assert (await manager.get(run_id)).state is RunState.PAUSED
    api.apply(BLUE, "two", changed(suspend=False))
    await reached(api, "two", "Queued")


async def test_a_pause_waits_until_the_run_can_be_paused(manager, api) -> None:
    api.apply(BLUE, "one", changed())
    run_id = (await reached(api, "one", "Starting"))["runId"]
    api.apply(BLUE, "one", changed(suspend=True))
    await asyncio.sleep(0.2)
    body = api.get(BLUE, "one")
    assert body["status"]["observedGeneration"] < body["metadata"]["generation"]
    await manager._apply(
        run_id, "ready", "Ready"
    )  # the transition that the driver applies when its workers are ready
    await reached(api, "one", "Pausing", "Paused")


async def test_a_suspended_new_object_is_checked_but_not_submitted(manager, api) -> None:
    api.apply(BLUE, "bad", changed(suspend=True, trainer={"steps": 0}))
    assert "trainer.steps" in rejection(await reached(api, "bad", "Rejected"))[2]
    api.apply(BLUE, "one", changed(suspend=True))
    assert rejection(await reached(api, "one", "Suspended"))[0] == "False"
    assert await runs_of(manager) == []
    api.apply(BLUE, "one", changed())
    await reached(api, "one", "Starting")


async def test_a_deleted_object_cancels_its_run_and_then_goes(manager, api) -> None:
    api.apply(BLUE, "one", changed())
    run_id = (await reached(api, "one", "Starting"))["runId"]
    api.delete(BLUE, "one")
    await until(lambda: api.get(BLUE, "one") is None)
    assert (await manager.get(run_id)).state is RunState.CANCELLED
    api.apply(BLUE, "one", changed())
    assert (await reached(api, "one", "Starting"))["runId"] != run_id


async def test_a_finished_run_keeps_its_object(manager, api) -> None:
    api.apply(BLUE, "one", changed())
    run_id = (await reached(api, "one", "Starting"))["runId"]
    await manager.cancel(run_id)
    await reached(api, "one", "Cancelled")
    api.apply(BLUE, "one", changed(trainer={"steps": 9}))
    assert rejection(await reached(api, "one", "Cancelled"))[1] == "NOT_EDITABLE"
    assert [run.run_id for run in await runs_of(manager)] == [run_id]
    api.delete(BLUE, "one")
    await until(lambda: api.get(BLUE, "one") is None)
    assert (await manager.get(run_id)).state is RunState.CANCELLED


async def test_a_run_that_is_deleted_over_the_api_is_not_submitted_again(database, api) -> None:
    async with open_manager(database) as manager:
        async with serving(manager, api):
            api.apply(BLUE, "one", changed())
            run_id = (await reached(api, "one", "Starting"))["runId"]
        await manager.cancel(run_id)
        await until(lambda: manager.drivers.find(run_id) is None)
        await manager.delete(run_id, revision=(await manager.get(run_id)).revision)
        async with serving(manager, api):
            await reached(api, "one", "Deleted")
            assert await runs_of(manager) == []
            api.delete(BLUE, "one")
            await until(lambda: api.get(BLUE, "one") is None)


def outcome(status: dict[str, Any]) -> dict[str, str]:
    """Returns the conditions with which Jobs report their end, by type, with their reasons."""
    ends = [end for end in status["conditions"] if end["type"] in ("Complete", "Failed")]
    assert all(end["status"] == "True" for end in ends)
    return {end["type"]: end["reason"] for end in ends}


async def test_a_run_of_a_lost_database_is_lost_until_it_is_submitted_again(database, api) -> None:
    async with open_manager(database) as manager:
        async with serving(manager, api):
            api.apply(BLUE, "one", changed())
            run_id = (await reached(api, "one", "Starting"))["runId"]
        await manager.cancel(run_id)
        await until(lambda: manager.drivers.find(run_id) is None)
        with database.write() as connection:  # a copy of the database from before the run
            connection.execute(RUNS.delete())
        launcher = Stopping()
        manager.drivers.services = replace(manager.drivers.services, launcher=launcher)
        async with serving(manager, api):
            status = await reached(api, "one", "Lost")
            assert outcome(status) == {"Failed": "Lost"}
            assert f"{RESUBMIT}={run_id}" in status["message"]
            assert launcher.stopped == [run_id], "its pods, secret and network policy go"
            await until(lambda: "Lost" in api.warnings)
            api.annotate(BLUE, "one", RESUBMIT, run_id)
            again = await reached(api, "one", "Starting")
            assert again["runId"] != run_id
            assert outcome(again) == {}
            assert len(await runs_of(manager)) == 1, "the annotation of an earlier run does nothing"


async def test_a_database_that_is_restored_brings_its_run_back(database, api) -> None:
    async with open_manager(database) as manager:
        async with serving(manager, api):
            api.apply(BLUE, "one", changed())
            run_id = (await reached(api, "one", "Starting"))["runId"]
        await manager.cancel(run_id)
        await until(lambda: manager.drivers.find(run_id) is None)
        with database.write() as connection:
            row = connection.execute(RUNS.select()).mappings().one()
            connection.execute(RUNS.delete())
        async with serving(manager, api):
            await reached(api, "one", "Lost")
        with database.write() as connection:
            connection.execute(RUNS.insert().values(**row))
        async with serving(manager, api):
            assert outcome(await reached(api, "one", "Cancelled")) == {"Failed": "CancelledByUser"}


async def test_an_ended_run_is_submitted_again_if_its_object_says_so(manager, api) -> None:
    api.apply(BLUE, "one", changed())
    run_id = (await reached(api, "one", "Starting"))["runId"]
    await manager.cancel(run_id)
    assert outcome(await reached(api, "one", "Cancelled")) == {"Failed": "CancelledByUser"}
    api.annotate(BLUE, "one", RESUBMIT, run_id)
    assert (await reached(api, "one", "Starting"))["runId"] != run_id
    assert len(await runs_of(manager)) == 2


async def test_an_object_goes_after_its_time_to_live_and_its_run_stays(manager, api) -> None:
    api.apply(BLUE, "one", {**changed(), "ttlSecondsAfterFinished": 1})
    run_id = (await reached(api, "one", "Starting"))["runId"]
    await manager.cancel(run_id)
    await reached(api, "one", "Cancelled")
    await until(lambda: api.get(BLUE, "one") is None)
    assert (await manager.get(run_id)).state is RunState.CANCELLED


async def test_a_run_that_succeeded_is_complete(manager, api) -> None:
    api.apply(BLUE, "one", changed())
    started = await manager.get((await reached(api, "one", "Starting"))["runId"])
    run = replace(started, state=RunState.SUCCEEDED, state_reason="Completed")
    assert outcome(status_of(run)) == {"Complete": "Completed"}
    assert outcome(status_of(replace(run, state=RunState.FAILED, state_reason="WorkerLost"))) == {
        "Failed": "WorkerLost"
    }
    assert outcome(status_of(replace(run, state=RunState.RUNNING))) == {}


async def test_a_later_controller_finds_the_runs_and_what_changed_meanwhile(database, api) -> None:
    async with open_manager(database, max_queued_runs=9) as manager:
        async with serving(manager, api):
            for name in ("one", "two", "three"):
                api.apply(BLUE, name, changed())
                await reached(api, name, "Starting", "Queued")
        # A controller may stop before it writes the first status, and a backup contains no status.
        api.drop_status(BLUE, "one")
        api.apply(BLUE, "two", changed(priority=7))
        api.delete(BLUE, "three")
        async with serving(manager, api):
            await reached(api, "one", "Starting")
            await reached(api, "two", "Queued")
            await until(lambda: api.get(BLUE, "three") is None)
        states = {run.name: (run.state, run.priority) for run in await runs_of(manager)}
        assert states == {
            "one": (RunState.STARTING, 0),
            "two": (RunState.QUEUED, 7),
            "three": (RunState.CANCELLED, 0),
        }


async def test_namespaces_are_projects(database, api) -> None:
    async with open_manager(database) as manager, serving(manager, api, BLUE, GREEN):
        for namespace in (BLUE, GREEN):
            api.apply(namespace, "one", changed())
            await reached(api, "one", "Starting", namespace=namespace)
        (blue,), (green,) = await runs_of(manager, BLUE), await runs_of(manager, GREEN)
        assert blue.run_id != green.run_id
        api.delete(GREEN, "one")
        await until(lambda: api.get(GREEN, "one") is None)
        assert (await manager.get(blue.run_id)).state is RunState.STARTING


@pytest.mark.parametrize("status", [403, 404])
async def test_a_cluster_without_the_kind_or_the_right_is_reported_once(
    database, api, caplog, monkeypatch, status
) -> None:
    monkeypatch.setattr("services.extras.kubernetes.pod_api._RETRY_S", 0.02)
    api.error = ApiException(status=status, reason="no")
    async with open_manager(database) as manager, serving(manager, api):
        api.apply(BLUE, "one", changed())
        await asyncio.sleep(0.5)
        warnings = [record for record in caplog.records if "cannot watch" in record.message]
        assert len(warnings) == 1
        assert warnings[0].objects == "rlruns.slipstream.dev of namespace blue"
        api.error = None
        await reached(api, "one", "Starting")


async def test_an_api_in_trouble_delays_only_the_object(manager, api, monkeypatch) -> None:
    monkeypatch.setattr("services.extras.kubernetes.rlruns._RETRY_S", 0.05)
    monkeypatch.setattr("services.extras.kubernetes.rlruns._WRITES_PER_S", 10.0)
    api.apply(BLUE, "one", changed())
    run_id = (await reached(api, "one", "Starting"))["runId"]
    api.error = ApiException(status=503, reason="busy")
    await manager.cancel(run_id)
    await until(lambda: manager.drivers.find(run_id) is None)
    assert (await manager.get(run_id)).state is RunState.CANCELLED
    api.error = None
    await reached(api, "one", "Cancelled")


async def test_a_run_whose_submission_fails_after_it_was_stored_is_the_run_of_its_object(
    manager, api, monkeypatch
) -> None:
    admit, failures = manager._admit, ["the database closed the connection"]

    async def failing() -> None:
        if failures:
            raise UnavailableError(failures.pop())
        await admit()

    monkeypatch.setattr(manager, "_admit", failing)
    api.apply(BLUE, "one", changed())
    await until(lambda: not failures)
    status = await reached(api, "one", "Queued", "Starting")
    assert rejection(status)[0] == "False"
    (run,) = await runs_of(manager)
    assert status["runId"] == run.run_id
    api.delete(BLUE, "one")
    await until(lambda: api.get(BLUE, "one") is None)
    assert (await manager.get(run.run_id)).state is RunState.CANCELLED


def test_the_status_is_written_twelve_times_a_minute_at_most_and_a_phase_is_not_delayed() -> None:
    now = 0.0
    budget = WriteBudget(lambda: now)
    written: list[float] = []
    phases = {7.0, 7.2, 90.0, 100.0, 200.0, 200.5}
    for tick in range(3000):
        now = tick / 10
        change = Change.PHASE if now in phases else Change.PROGRESS
        if not budget.take(change):
            written.append(now)
        else:
            assert change is not Change.PHASE
    for begin in written:
        assert sum(begin <= time < begin + 60 for time in written) <= 12
    assert len(written) >= 9 * 5


@pytest.mark.parametrize(
    ("ago_s", "remaining_s"), [(10.0, 50.0), (100.0, 0.0), (-7200.0, 60.0), (60.0, 0.0)]
)
def test_an_object_waits_for_no_longer_than_its_time_after_the_clock_was_set_back(
    ago_s, remaining_s
):
    run = SimpleNamespace(finish_time=time.time() - ago_s)
    body = {"spec": {"ttlSecondsAfterFinished": 60.0}}
    assert _remaining_s(body, run) == pytest.approx(remaining_s, abs=5.0)
