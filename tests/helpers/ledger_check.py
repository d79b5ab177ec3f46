"""Checks the invariants of an ended run in its database; kills of any process must not break them."""

import json
import sqlite3
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from tests.helpers.due_check import check_due, check_fit


def check_run(state_directory: Path, run_id: str = "") -> dict[str, int]:
    """Checks a run of a state directory, by default its only or oldest one; returns counts of its events.

    Every issued prompt is in exactly one state, no prompt trained twice, no token beyond the
    staleness bound was in the loss, no group trained that is not fit for it, everything that was due
    happened, versions only increased, and events have no gap.
    """
    with sqlite3.connect(state_directory / "slipstream.db") as connection:
        connection.row_factory = sqlite3.Row
        runs = connection.execute("SELECT * FROM runs ORDER BY run_id").fetchall()
        run = next(run for run in runs if run_id in ("", run["run_id"]))
        assert run["state"] == "SUCCEEDED", run["message"]
        spec = json.loads(run["spec_json"])

        def rows(table: str, order: str = "run_id") -> list[sqlite3.Row]:
            query = f"SELECT * FROM {table} WHERE run_id = ? ORDER BY {order}"
            return connection.execute(query, (run["run_id"],)).fetchall()

        (ledger,) = rows("ledgers")
        live = [row["sequence"] for row in rows("prompts")]
        dead_letters = rows("dead_letters")
        steps = rows("steps", "step")
        events = rows("events", "seq")
    trained = [group for step in steps for group in json.loads(step["groups_json"])]
    sequences = [sequence for sequence, *_ in trained]
    dead = [row["sequence"] for row in dead_letters]
    everywhere = sequences + live + dead
    assert sorted(everywhere) == list(range(ledger["num_issued"]))
    # The specification of a run whose length is given in epochs has no number of steps.
    num_steps = spec["trainer"]["steps"] or len(steps)
    assert [step["step"] for step in steps] == list(range(1, num_steps + 1))
    assert all(step["is_committed"] for step in steps)
    algorithm = spec["algorithm"]
    bound = algorithm["max_staleness"]
    # Supervised fine-tuning trains answers from the data, which no weight version sampled.
    sampled = [] if algorithm["loss"] == "sft" else steps
    for step in sampled:
        assert json.loads(step["metrics_json"])["staleness_max"] <= bound, step["step"]
        for sequence, _, _, oldest in json.loads(step["groups_json"]):
            staleness = step["weight_version"] - oldest
            # With "mask" a group may have tokens beyond the bound; its tokens are checked below.
            most = staleness if algorithm["on_stale"] == "mask" else bound
            assert 0 <= staleness <= most, (step["step"], sequence)
    summary = json.loads(run["summary_json"])["staleness"]
    assert summary["max"] <= summary["bound"] == bound, summary
    database = state_directory / "samples" / f"{run['run_id']}.db"
    checked: dict[str, int] = {}
    if database.exists() and sampled:
        checked = check_trained_tokens(database, sampled, bound)
        checked["groups_checked"] = check_fit(database, sampled, algorithm)
    check_due(events, spec, num_steps=num_steps)
    published = _data(events, "WeightsPublished")
    versions = [data["version"] for data in published]
    assert versions == sorted(versions)
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    return {
        "issued": ledger["num_issued"],
        "trained": len(sequences),
        "dead": len(dead),
        "refilled": sum(row["reason"] == "equal_rewards" for row in dead_letters),
        "saved": len(_data(events, "CheckpointSaved")),
        "evaluated": len(_data(events, "Validated")),
        "missed": sum(data["status"] == "missed" for data in _data(events, "Validated")),
        "losses": len(_data(events, "WorkerLost")),
        "rewinds": len(_data(events, "Rewound")),
        **checked,
    }


def check_trained_tokens(path: Path, steps: Sequence[sqlite3.Row], bound: int) -> dict[str, int]:
    """Checks every token in the trainer's loss, using the loss masks of the run's sample records.

    Args:
        path: Database of the run's sample records, which all processes have closed.
        steps: Committed steps of the run.
        bound: ``algorithm.max_staleness``.

    Returns:
        Numbers of checked samples and of their tokens that trained and that did not, and the highest
        staleness of a trained token.
    """
    versions = {step["step"]: step["weight_version"] for step in steps}
    attempts = {
        (step["step"], sequence): attempt
        for step in steps
        for sequence, _, attempt, _ in json.loads(step["groups_json"])
    }
    counts = {"samples_checked": 0, "trained_tokens": 0, "untrained_tokens": 0, "oldest_trained": 0}
    for row, facts in _kept(path):
        sequence = int(facts["group_id"].removeprefix("g"))
        runs = array("i", row["version_runs"])
        pairs = zip(runs[::2], runs[1::2], strict=True)
        tokens = list(chain.from_iterable(repeat(version, count) for version, count in pairs))
        mask = row["loss_mask"]
        # After a step was repeated, the record may belong to another attempt than the one that was committed.
        is_committed = attempts.get((row["step"], sequence)) == facts["attempt"]
        if not is_committed or len(tokens) != len(mask):
            continue
        trained = [version for version, is_trained in zip(tokens, mask, strict=True) if is_trained]
        staleness = versions[row["step"]] - min(trained, default=versions[row["step"]])
        assert 0 <= staleness <= bound, (row["step"], row["id"], staleness)
        counts["samples_checked"] += 1
        counts["trained_tokens"] += len(trained)
        counts["untrained_tokens"] += len(tokens) - len(trained)
        counts["oldest_trained"] = max(counts["oldest_trained"], staleness)
    return counts


def _kept(path: Path) -> Iterator[tuple[sqlite3.Row, Mapping[str, Any]]]:
    """Yields the training data and the facts of each sample record of the split ``train``."""
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        rows = connection.execute(
            "SELECT training.id, training.step, loss_mask, version_runs, facts.facts FROM training "
            "JOIN contents ON contents.id = training.id "
            "JOIN samples AS facts ON facts.id = training.id WHERE facts.split = 'train'"
        )
        for row in rows:
            yield row, json.loads(row["facts"])


def _data(events: list[sqlite3.Row], kind: str) -> list[dict]:
    return [json.loads(event["data_json"]) for event in events if event["type"] == kind]
