"""`topology.placement: colocated`: the same training, with one side asleep while the other works."""

import json

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
        assert all(("handover_s" in step) == (placement == "colocated") for step in steps)
    assert trained[0] == [pytest.approx(step, abs=1e-4) for step in trained[1]]
