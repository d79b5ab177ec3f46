"""Tests that the conditions of a run are a function of its events."""

import pytest

from services.controller.rules.run_state import Condition, RunEvent, conditions_after
from services.controller.store.records import NewRun, Note
from services.controller.store.runs import RunStore

READY = ("WorkersReady", "all workers have loaded", {"absent": []})
PENDING = ("WorkerPending", "Unschedulable: 0/3 nodes have a GPU", {"reason": "Unschedulable"})
STILL = ("NoProgress", "no step for 90 s: 3 of 32 groups", {"reason": "WaitsForGroups"})
SOME = ("WorkersReady", "continues without rollout-1", {"absent": ["rollout-1"]})
MORE = ("Resized", "2 rollouts; in a queue: rollout-2", {"absent": ["rollout-2"]})
ALL = ("Replaced", "3 rollouts", {"absent": []})
LOST = ("WorkerLost", "rollout-0 ended with signal 9\nlast line", {"workers": ["rollout-0"]})


def moved(to: str, reason: str = "Why", message: str = "why"):
    return ("StateChanged", message, {"from": "", "to": to, "reason": reason})


def after(*events) -> dict[str, Condition]:
    """Returns the conditions of a run by type after the given events, one per second."""
    conditions: tuple[Condition, ...] = ()
    for time, (event, message, data) in enumerate([("Submitted", "", {}), *events]):
        conditions = conditions_after(
            conditions, event, message, data, generation=1, time=float(time)
        )
    return {condition.type: condition for condition in conditions}


def statuses(*events) -> str:
    """Returns the first letter of each condition's status, in the order of the documentation."""
    return "".join(condition.status[0] for condition in after(*events).values())


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], "FFFFFFF"),
        ([moved("STARTING")], "TUFFFFF"),
        ([moved("STARTING"), PENDING], "TFFFFFF"),
        ([moved("STARTING"), READY, moved("RUNNING")], "TTTTTFF"),
        ([moved("STARTING"), READY, moved("RUNNING"), LOST], "TFFTTTF"),
        ([moved("STARTING"), READY, LOST, moved("RECOVERING"), READY, moved("RUNNING")], "TTTTTFF"),
        ([moved("STARTING"), READY, moved("RUNNING"), PENDING, MORE], "TFTTTFF"),
        ([moved("STARTING"), READY, moved("RUNNING"), LOST, SOME, MORE], "TFTTTTF"),
        ([moved("STARTING"), READY, moved("RUNNING"), LOST, SOME, ALL], "TTTTTFF"),
        ([moved("STARTING"), READY, moved("RUNNING"), moved("PAUSING")], "TTTTTFF"),
        ([moved("STARTING"), READY, moved("RUNNING"), STILL], "TTTTFFF"),
        ([moved("STARTING"), READY, moved("RUNNING"), STILL, ("StepCommitted", "", {})], "TTTTTFF"),
        ([moved("STARTING"), READY, moved("RUNNING"), moved("PAUSED")], "FFFFFFF"),
        ([moved("STARTING"), ("CheckpointSaved", "step 3", {}), moved("SUCCEEDED")], "FFFFFFT"),
        ([("CheckpointSaved", "step 3", {}), ("CheckpointFailed", "disk", {})], "FFFFFFF"),
    ],
)
def test_each_event_changes_its_conditions(events, expected):
    assert statuses(*events) == expected


def test_a_status_that_stays_keeps_its_time_and_gets_the_newest_reason():
    waiting = after(("Waiting", "no GPU is left", {"reason": "GpuQuota"}))["Admitted"]
    assert (waiting.reason, waiting.last_transition_time) == ("GpuQuota", 0.0)
    assert after(moved("STARTING"))["Admitted"].last_transition_time == 1.0


def test_a_checkpoint_that_is_lost_with_the_trainer_is_not_current():
    saved = after(("CheckpointSaved", "step 3", {"reason": "Volatile"}))["CheckpointCurrent"]
    assert (saved.status, saved.reason) == ("False", "Volatile")
    assert after(("CheckpointSaved", "step 3", {}))["CheckpointCurrent"].status == "True"


def test_a_failed_run_keeps_the_obstacle_to_its_start():
    placed = after(moved("STARTING"), PENDING, moved("FAILED", "WorkerLost", "gave up"))["Placed"]
    assert (placed.reason, placed.message) == ("Unschedulable", PENDING[1])


@pytest.mark.parametrize("end", ["SUCCEEDED", "FAILED", "CANCELLED", "PAUSED"])
@pytest.mark.parametrize("before", [[], [moved("STARTING"), READY, moved("RUNNING"), STILL]])
def test_an_ended_run_has_no_waiting_condition(before, end):
    conditions = after(*before, moved(end, "Over", "it is over"))
    del conditions["CheckpointCurrent"]
    untold = {
        name: condition for name, condition in conditions.items() if condition.reason != "Over"
    }
    assert set(untold) <= {"Degraded"} and all(
        condition.reason == "AsExpected" for condition in untold.values()
    )


def test_a_call_that_fails_while_all_workers_live_leaves_the_data_plane_unknown():
    conditions = after(moved("STARTING"), READY, ("WorkerLost", "UNAVAILABLE", {"workers": []}))
    assert conditions["DataPlaneReady"].status == "Unknown"
    assert conditions["Placed"].status == "True"


def test_conditions_are_stored_with_their_events_and_their_generation(database):
    store = RunStore(database)
    run, _ = store.create(NewRun(run_id="run_1", name="one", spec_json="{}", spec_digest="d"))
    store.apply("run_1", RunEvent.ADMIT, reason="Admitted")
    store.patch("run_1", revision=2, values={"spec_json": "{}", "spec_digest": "e"})
    store.record("run_1", Note("StepCommitted", "step 1 is trained", {}, 1))
    before = store.get("run_1")
    store.record("run_1", Note("StepCommitted", "step 2 is trained", {}, 2))
    conditions = {condition.type: condition for condition in store.get("run_1").conditions}
    assert (run.generation, before.generation) == (1, 2)
    assert (conditions["Admitted"].observed_generation, conditions["Admitted"].reason) == (
        1,
        "Admitted",
    )
    assert (conditions["Progressing"].observed_generation, conditions["Progressing"].status) == (
        2,
        "True",
    )
    assert store.get("run_1").conditions == before.conditions
