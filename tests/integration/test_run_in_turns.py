"""`topology.placement`: training with colocated and mixed placement."""

import json
import sqlite3
from contextlib import closing

import pytest

pytestmark = pytest.mark.timeout(300)


def test_rollouts_of_a_mixed_run_continue_groups_that_others_parked(plumbing, system):
    result = system.train(
        plumbing,
        "topology.placement=mixed",
        "rollout.replicas=3",
        "rollout.max_response_tokens=64",
        "algorithm.max_staleness=2",
        "trainer.steps=6",
    )
    assert result.code == 0, result.out + result.err
    steps = [json.loads(line) for line in (result.folder / "metrics.jsonl").open()]
    assert all("gpu_switch_s" in step for step in steps)
    assert max(step["staleness_max"] for step in steps) <= 2
    with closing(sqlite3.connect(system.state / "slipstream.db")) as database:
        rows = database.execute(
            "SELECT groups_json FROM steps WHERE run_id = ?", [result.folder.name]
        ).fetchall()
    attempts = [attempt for (text,) in rows for _, _, attempt, _ in json.loads(text)]
    assert max(attempts) > 1
