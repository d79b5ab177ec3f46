"""The validation machine against its golden traces."""

import json
from pathlib import Path

import pytest

from services.controller.run.validation import ValidationMachine, is_periodic

CASES = json.loads((Path(__file__).parents[2] / "vectors" / "validation_sm.json").read_text())[
    "cases"
]
TRACES = [case for case in CASES if "events" in case["inputs"]]


def apply(machine: ValidationMachine, event: str, args: dict) -> None:
    method = getattr(machine, event)
    if event == "published":
        method(args["v"])
    elif event == "trigger":
        method(args["v"], args["reason"])
    elif event == "sample_done":
        method(args.get("n", 1))
    else:
        method()


@pytest.mark.parametrize("case", TRACES, ids=lambda case: case["name"])
def test_machine_reproduces_the_golden_trace(case):
    inputs = case["inputs"]
    machine = ValidationMachine(
        inputs["total"], retries=inputs.get("retries", 1), enabled=inputs.get("enabled", True)
    )
    for (event, args), expected in zip(inputs["events"], case["expected"]["trace"], strict=True):
        apply(machine, event, args)
        got = {
            "state": machine.state.value,
            "lease": machine.has_lease,
            "pending": machine.pending,
            "pinned": machine.pinned,
        }
        assert got == {key: expected[key] for key in got}, event
    assert [
        {
            "version": result.version,
            "reason": result.reason,
            "status": result.status,
            "samples": result.num_samples,
        }
        for result in machine.results
    ] == case["expected"]["results"]


def test_periodic_versions_are_multiples():
    case = next(case for case in CASES if case["name"] == "trigger_policy")
    versions = case["inputs"]["versions"]
    assert [is_periodic(v, 5) for v in versions] == case["expected"]["freq5"]
    assert [is_periodic(v, -1) for v in versions] == case["expected"]["freq_minus1"]


def test_newest_pending_trigger_wins_but_never_over_a_final_one():
    machine = ValidationMachine(1)
    machine.published(1)
    machine.trigger(1, "periodic")
    machine.trigger(2, "periodic")
    machine.trigger(3, "final")
    machine.trigger(4, "periodic")
    assert machine.pending == (3, "final")


def test_timeout_while_running_scores_what_there_is():
    machine = ValidationMachine(4)
    machine.published(0)
    machine.trigger(0, "initial")
    machine.leased()
    machine.sample_done(3)
    machine.timeout()
    assert not machine.has_lease
    machine.scored()
    machine.reported()
    assert (machine.results[0].status, machine.results[0].num_samples) == ("timeout", 3)


def machine_in(state: str, *, version: int = 5, total: int = 4, retries: int = 1):
    """A machine that evaluates ``version`` and was brought to a state."""
    machine = ValidationMachine(total, retries=retries)
    machine.published(version - 1 if state == "WAIT_WEIGHTS" else version)
    if state == "IDLE":
        return machine
    machine.trigger(version, "periodic")
    for reached, event in (
        ("ACQUIRE", machine.leased),
        ("RUNNING", lambda: machine.sample_done(total)),
        ("SCORING", machine.scored),
    ):
        if state in ("WAIT_WEIGHTS", reached):
            break
        event()
    if state == "CANCELLING":
        machine.stop()
    assert machine.state.value == state
    return machine


# What each guard of the table means for a machine that evaluates version 5 with 4 samples.
GUARDS = {
    ("trigger", "published<version"): lambda machine: machine.trigger(6, "periodic"),
    ("trigger", "published==version"): lambda machine: machine.trigger(5, "periodic"),
    ("trigger", "published>version"): lambda machine: machine.trigger(4, "periodic"),
    ("published", "v<version"): lambda machine: machine.published(4),
    ("published", "v==version"): lambda machine: machine.published(5),
    ("sample_done", "done<total"): lambda machine: machine.sample_done(3),
    ("sample_done", "done==total"): lambda machine: machine.sample_done(4),
    ("reported", "pending"): lambda machine: (machine.trigger(5, "manual"), machine.reported()),
}
TABLE = next(case for case in CASES if case["name"] == "transition_table")["expected"]["rows"]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: " ".join(row[:3]))
def test_every_row_of_the_transition_table_holds(row):
    state, event, guard, following, action = row
    if event == "replica_lost":
        # The run's loop is entered again without the replica, and begins the evaluation anew: see
        # test_what_an_earlier_loop_began_is_begun_again_if_it_is_still_served.
        return
    retries = 0 if guard == "retries_left==0" else 1
    machine = machine_in("RUNNING" if state == "*" else state, retries=retries)
    if (event, guard) in GUARDS:
        GUARDS[event, guard](machine)
    else:
        getattr(machine, event)()
    after_pending = "ACQUIRE" if following.startswith("(") else following
    assert machine.state.value == after_pending
    if "release_lease" in action:
        assert not machine.has_lease
    if action == "report(missed)":
        assert machine.results[-1].status == "missed"


@pytest.mark.parametrize("state", ["WAIT_WEIGHTS", "ACQUIRE", "RUNNING"])
def test_every_state_that_waits_for_others_has_a_way_out_in_time(state):
    machine = machine_in(state)
    machine.timeout()
    machine.scored()
    machine.reported()
    assert (machine.state.value, machine.pinned, machine.has_lease) == ("IDLE", None, False)
    assert machine.results[-1].status == "timeout"


def test_a_version_that_nobody_serves_any_more_is_missed():
    machine = machine_in("ACQUIRE")
    machine.missed()
    machine.reported()
    assert machine.results[-1].status == "missed"
