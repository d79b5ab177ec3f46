"""Reads the database of a run that ended and checks what must hold whatever was killed."""

import json
import sqlite3
from pathlib import Path


def check_run(state_directory: Path) -> dict[str, int]:
    """Check the only run of a state directory; returns what it went through.

    Every issued prompt is in one place, none was trained twice, none was too stale, versions only grew,
    events have no gap.
    """
    with sqlite3.connect(state_directory / "slipstream.db") as connection:
        connection.row_factory = sqlite3.Row
        run = connection.execute("SELECT * FROM runs").fetchone()
        assert run["state"] == "SUCCEEDED", run["message"]
        spec = json.loads(run["spec_json"])
        ledger = connection.execute("SELECT * FROM ledgers").fetchone()
        live = [row["sequence"] for row in connection.execute("SELECT * FROM prompts")]
        dead = [row["sequence"] for row in connection.execute("SELECT * FROM dead_letters")]
        steps = connection.execute("SELECT * FROM steps ORDER BY step").fetchall()
        events = connection.execute("SELECT * FROM events ORDER BY seq").fetchall()
    trained = [group for step in steps for group in json.loads(step["groups_json"])]
    sequences = [sequence for sequence, *_ in trained]
    everywhere = sequences + live + dead
    assert sorted(everywhere) == list(range(ledger["num_issued"]))
    # A run that is measured in epochs does not say how many steps they are.
    num_steps = spec["trainer"]["steps"] or len(steps)
    assert [step["step"] for step in steps] == list(range(1, num_steps + 1))
    assert all(step["is_committed"] for step in steps)
    # Answers that rows have were sampled by no version.
    sampled = [] if spec["algorithm"]["loss"] == "sft" else steps
    for step in sampled:
        for sequence, _, _, oldest in json.loads(step["groups_json"]):
            staleness = step["weight_version"] - oldest
            assert 0 <= staleness <= spec["algorithm"]["max_staleness"], (step["step"], sequence)
    published = _data(events, "WeightsPublished")
    versions = [data["version"] for data in published]
    assert versions == sorted(versions)
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    return {
        "issued": ledger["num_issued"],
        "trained": len(sequences),
        "dead": len(dead),
        "losses": len(_data(events, "WorkerLost")),
        "rewinds": len(_data(events, "Rewound")),
    }


def _data(events: list[sqlite3.Row], kind: str) -> list[dict]:
    return [json.loads(event["data_json"]) for event in events if event["type"] == kind]
