"""`topology.placement`: the same training, with one side asleep while the other works, or a part of it."""

import json
import sqlite3
from contextlib import closing

import pytest

pytestmark = pytest.mark.timeout(300)


def test_a_run_in_turns_trains_what_a_run_apart_trains(plumbing, system):
    trained = []
    for placement in ("disaggregated", "colocated"):
        done = system.train(
            plumbing,
            "algorithm.max_staleness=0",
            "rollout.replicas=2",
            "trainer.world_size=2",
            "trainer.checkpoint.every=1",
            "validation.every=1",
            f"topology.placement={placement}",
        )
        assert done.code == 0, done.out + done.err
        steps = [json.loads(line) for line in (done.folder / "metrics.jsonl").open()]
        trained.append([(step["reward_mean"], step["loss"]) for step in steps])
        assert all(("gpu_switch_s" in step) == (placement == "colocated") for step in steps)
    assert trained[0] == [pytest.approx(step, abs=1e-4) for step in trained[1]]


def test_of_a_mixed_run_some_rollouts_go_on_with_what_others_put_aside(plumbing, system):
    done = system.train(
        plumbing,
        "topology.placement=mixed",
        "rollout.replicas=3",
        "rollout.max_response_tokens=64",
        "algorithm.max_staleness=2",
        "trainer.steps=6",
    )
    assert done.code == 0, done.out + done.err
    steps = [json.loads(line) for line in (done.folder / "metrics.jsonl").open()]
    assert all("gpu_switch_s" in step for step in steps)
    assert max(step["staleness_max"] for step in steps) <= 2
    with closing(sqlite3.connect(system.state / "slipstream.db")) as database:
        rows = database.execute(
            "SELECT groups_json FROM steps WHERE run_id = ?", [done.folder.name]
        ).fetchall()
    attempts = [attempt for (text,) in rows for _, _, attempt, _ in json.loads(text)]
    assert max(attempts) > 1
