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
