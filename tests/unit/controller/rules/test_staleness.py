"""Tests of the staleness gate against golden values."""

import json
from pathlib import Path

from services.controller.rules.staleness import StalenessGate

CASES = {
    case["name"]: case
    for case in json.loads((Path(__file__).parents[3] / "vectors" / "staleness.json").read_text())[
        "cases"
    ]
}


def test_capacity_is_the_number_of_groups_under_the_bound():
    for row in CASES["bounded_admission"]["expected"]["rows"]:
        gate = StalenessGate(max_staleness=row["eta"], groups_per_step=row["batch"])
        capacity = gate.capacity(
            published=row["version"],
            num_admitted=row["accepted"] + row["running"],
            max_groups=row["max_concurrent"] - row["running"],
        )
        assert capacity == row["capacity"], row
        assert (capacity > 0) == row["admit_one"], row


def test_a_due_group_becomes_stale_one_version_later():
    gate = StalenessGate(max_staleness=1, groups_per_step=2)
    assert gate.batches_left(0, trainer_version=1) == 0
    assert not gate.is_stale(0, trainer_version=1)
    assert gate.is_stale(0, trainer_version=2)
    assert gate.batches_left(1, trainer_version=1) == 1


def train_in_order_of_completion(inputs):
    """Returns the batches of a run whose groups take ``durations`` versions, with each group's staleness."""
    gate = StalenessGate(max_staleness=inputs["eta"], groups_per_step=inputs["batch"])
    waiting = list(enumerate(inputs["durations"]))
    running, ready, batches, admitted = [], [], [], 0
    for version in range(inputs["steps"]):
        room = gate.capacity(published=version, num_admitted=admitted, max_groups=10**9)
        for number, duration in waiting[:room]:
            running.append((version + duration, number, version))
        admitted += len(waiting[:room])
        waiting = waiting[room:]
        ready += sorted(group for group in running if group[0] <= version)
        running = [group for group in running if group[0] > version]
        batch, ready = ready[: inputs["batch"]], ready[inputs["batch"] :]
        batches.append(
            [{"head_staleness": version - begun, "id": number} for _, number, begun in batch]
        )
    return batches


def test_admission_alone_bounds_groups_of_equal_length():
    case = CASES["admission_bounds_uniform_lengths"]
    assert train_in_order_of_completion(case["inputs"]) == case["expected"]["batches"]


def test_admission_alone_does_not_bound_a_long_group():
    inputs = {"batch": 1, "durations": [0, 6, 0, 0, 0, 0, 0, 0], "eta": 1, "steps": 7}
    lags = [
        group["head_staleness"] for batch in train_in_order_of_completion(inputs) for group in batch
    ]
    assert max(lags) > inputs["eta"]
