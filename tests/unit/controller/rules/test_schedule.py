"""Tests that the order of groups and the staleness bound reproduce the golden schedules, tick by tick."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services.controller.rules.staleness import StalenessGate, resume_key

CASES = json.loads((Path(__file__).parents[3] / "vectors" / "apr_schedule.json").read_text())[
    "cases"
]


@dataclass
class Unfinished:
    """Group of the tick model: each member with a slot generates ``speed`` tokens per tick."""

    number: int
    lengths: list[int]
    done: list[int] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)
    running: set[int] = field(default_factory=set)

    def __post_init__(self):
        self.done = [0] * len(self.lengths)

    @property
    def waiting(self):
        return [
            member
            for member, length in enumerate(self.lengths)
            if self.done[member] < length and member not in self.running
        ]

    @property
    def is_complete(self):
        return self.done == self.lengths

    def tick(self, version, speed):
        for member in list(self.running):
            self.done[member] = min(self.done[member] + speed, self.lengths[member])
            self.versions.add(version)
            if self.done[member] == self.lengths[member]:
                self.running.remove(member)


def play(inputs):
    """Returns all rounds of a case."""
    gate = StalenessGate(
        max_staleness=inputs["max_staleness"], groups_per_step=inputs["target_groups"]
    )
    fresh = iter(enumerate(inputs["lengths"]))
    cached = []
    rounds = []
    for version in range(inputs["steps"]):
        dropped = [g for g in cached if gate.is_stale(min(g.versions), trainer_version=version)]
        cached = sorted(
            (group for group in cached if group not in dropped),
            key=lambda group: resume_key(
                is_at_risk=gate.is_at_risk(min(group.versions), version),
                num_unfinished=len(group.waiting),
                num_tokens=sum(group.done),
                sequence=group.number,
            ),
        )
        round_result, rest = play_round(version, inputs, cached, fresh)
        round_result["dropped"] = sorted(group.number for group in dropped)
        rounds.append(round_result)
        cached = rest
        if not round_result["completed"] and not rest:
            break
    return rounds


def play_round(version, inputs, cached, fresh):
    target = inputs["target_groups"]
    active = list(cached)
    resumed, started, completed = [], [], []
    ticks = 0
    while len(completed) < target:
        free = inputs["slots"] - sum(len(group.running) for group in active)
        while free > 0:
            group = next((group for group in active if group.waiting), None)
            if group is None:
                may_start = inputs.get("supplement", True) or (
                    len(active) + len(completed) < target
                )
                next_group = next(fresh, None) if may_start else None
                if next_group is None:
                    break
                group = Unfinished(next_group[0], next_group[1])
                active.append(group)
                started.append(group.number)
            elif group in cached and group.number not in resumed:
                resumed.append(group.number)
            group.running.add(group.waiting[0])
            free -= 1
        if not any(group.running for group in active):
            break
        ticks += 1
        for group in active:
            group.tick(version, inputs["speed"])
        done = [group for group in active if group.is_complete]
        completed += done
        active = [group for group in active if not group.is_complete]
    for group in active:
        group.running.clear()
    trained = completed[:target]
    return {
        "version": version,
        "ticks": ticks,
        "resumed": resumed,
        "started": started,
        "completed": [group.number for group in completed],
        "trained": [group.number for group in trained],
        "trained_spans": [max(g.versions) - min(g.versions) for g in trained],
        "leftover_done": [group.number for group in completed[target:]],
        "cached": {str(group.number): list(group.done) for group in active},
    }, active


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_schedule_is_the_golden_one(case):
    expected = case["expected"]["rounds"]
    for played, want in zip(play(case["inputs"]), expected, strict=True):
        assert played == want
