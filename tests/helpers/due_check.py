"""Checks that everything that was due in an ended run happened: checkpoints, evaluations, refills."""

import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

# Longer than the time from a committed step to the start of its checkpoint.
_MARGIN_S = 2.0


def check_due(events: Sequence[sqlite3.Row], spec: Mapping[str, Any], *, num_steps: int) -> None:
    """Checks checkpoints and evaluations of a run that trained ``num_steps``.

    Args:
        events: All events, in order.
    """
    checkpoint = spec["trainer"]["checkpoint"]
    if checkpoint["every"]:
        _check_saved_steps(events, checkpoint["every"], num_steps=num_steps)
    elif checkpoint["every_s"]:
        _check_saved_times(events, checkpoint["every_s"])
    if spec["data"].get("heldout"):
        _check_evaluations(events, spec["validation"], num_steps=num_steps)


def check_fit(database: Path, steps: Sequence[sqlite3.Row], algorithm: Mapping[str, Any]) -> int:
    """Checks that no group trained that dynamic sampling or ``min_group_size`` excludes.

    Args:
        database: Database of the run's sample records, which all processes have closed.
        steps: Committed steps.

    Returns:
        Number of checked groups.
    """
    attempts = {
        sequence: attempt
        for step in steps
        for sequence, _, attempt, _ in json.loads(step["groups_json"])
    }
    rewards: dict[int, list[float]] = defaultdict(list)
    members: dict[int, int] = defaultdict(int)
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT facts FROM samples WHERE split = 'train'")
        for facts in (json.loads(text) for (text,) in rows):
            sequence = int(facts["group_id"].removeprefix("g"))
            if attempts.get(sequence) == facts["attempt"]:
                members[sequence] += 1
                if facts["finish_reason"] != "failed":
                    rewards[sequence].append(facts["reward"])
    size = max(members.values(), default=0)
    whole = [sequence for sequence, count in members.items() if count == size]
    for sequence in whole:
        of_group = rewards[sequence]
        assert len(of_group) >= algorithm["min_group_size"], sequence
        if algorithm["dynamic_sampling"] and algorithm["max_refill_factor"] >= 100:
            assert max(of_group) > min(of_group), f"group {sequence} has equal rewards"
    return len(whole)


def _data(event: sqlite3.Row) -> dict[str, Any]:
    return dict(json.loads(event["data_json"]))


def _of(events: Iterable[sqlite3.Row], *types: str) -> list[tuple[str, dict[str, Any]]]:
    return [(event["type"], _data(event)) for event in events if event["type"] in types]


def _check_saved_steps(events: Sequence[sqlite3.Row], every: int, *, num_steps: int) -> None:
    tried = {data["step"] for _, data in _of(events, "CheckpointSaved", "CheckpointFailed")}
    # A step that changed no weights is not saved; the next one is.
    skipped = {data["step"] for _, data in _of(events, "StepSkipped")}
    due = set(range(every, num_steps, every)) - skipped
    assert due <= tried, f"checkpoints of steps {sorted(due - tried)} are missing"


def _check_saved_times(events: Sequence[sqlite3.Row], every_s: float) -> None:
    """Checks that each step that ended after ``every_s`` without a checkpoint was saved before the next."""
    saved_at, saved_step, step, overdue = events[0]["time"], 0, 0, 0
    for event in events:
        kind, time = event["type"], event["time"]
        if kind == "StepCommitted":
            assert not overdue, f"step {overdue} was not saved after {every_s} s"
            step = _data(event)["step"]
            if time - saved_at >= every_s + _MARGIN_S:
                overdue = step
        elif kind in ("CheckpointSaved", "CheckpointFailed"):
            saved_at, saved_step, overdue = time, _data(event)["step"], 0
        elif kind == "Rewound":
            step = saved_step = _data(event)["step"]
            saved_at, overdue = time, 0
        elif kind == "WorkersReady" and step == saved_step:
            saved_at = time  # nothing was unsaved


def _check_evaluations(
    events: Sequence[sqlite3.Row], validation: Mapping[str, Any], *, num_steps: int
) -> None:
    ended = [data for _, data in _of(events, "Validated")]
    for _, begun in _of(events, "ValidationStarted"):
        key = begun["version"], begun["reason"]
        assert key in [(data["version"], data["reason"]) for data in ended], f"no end of {begun}"
    steps = {data["step"] for data in ended}
    newest, every = 0, validation["every"]
    for kind, data in _of(events, "WeightsPublished", "Rewound"):
        if kind == "Rewound":
            newest = min(newest, data["step"])
            continue
        step = data["step"]
        if every and any(number % every == 0 for number in range(newest + 1, step + 1)):
            assert step in steps, f"no evaluation of step {step}"
        newest = max(newest, step)
    if validation["at_end"]:
        assert num_steps in steps, "no evaluation of the last step"
