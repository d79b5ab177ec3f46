"""The staleness gate against its golden rows."""

import json
from pathlib import Path

from services.controller.run.staleness import StalenessGate

CASES = {
    case["name"]: case
    for case in json.loads((Path(__file__).parents[2] / "vectors" / "staleness.json").read_text())[
        "cases"
    ]
}


def test_capacity_is_the_room_under_the_bound():
    for row in CASES["bounded_admission"]["expected"]["rows"]:
        gate = StalenessGate(max_staleness=row["eta"], groups_per_step=row["batch"])
        capacity = gate.capacity(
            published=row["version"],
            num_admitted=row["accepted"] + row["running"],
            num_running=row["running"],
            max_running=row["max_concurrent"],
        )
        assert capacity == row["capacity"], row
        assert (capacity > 0) == row["admit_one"], row


def test_generate_ahead_is_the_same_gate():
    for row in CASES["generate_ahead_gate"]["expected"]["rows"]:
        gate = StalenessGate(max_staleness=row["generate_ahead_steps"], groups_per_step=1)
        allowed = [
            step
            for step in range(1, 9)
            if gate.may_generate_step(step, published=row["published_version"])
        ]
        assert allowed == row["allowed_steps"], row


def test_a_due_group_becomes_stale_one_version_later():
    gate = StalenessGate(max_staleness=1, groups_per_step=2)
    assert gate.is_due(0, trainer_version=1)
    assert not gate.is_stale(0, trainer_version=1)
    assert gate.is_stale(0, trainer_version=2)
    assert not gate.is_due(1, trainer_version=1)
