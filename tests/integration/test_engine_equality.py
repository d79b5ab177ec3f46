"""Equal logprobs of the engine torch and the trainer in a synchronous run with batch_invariant."""

import json

import pytest

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("world_size", [1, 2])
def test_engine_and_trainer_are_equal_at_lag_0(plumbing, system, world_size):
    result = system.train(
        plumbing,
        "model.path=tiny:qwen3-0.4m",
        "algorithm.max_staleness=0",
        "algorithm.correction=none",
        "rollout.max_response_tokens=40",
        "rollout.reproducible=batch_invariant",
        "rollout.sampling.temperature=0.7",
        f"trainer.world_size={world_size}",
    )
    assert result.code == 0, result.out + result.err
    lines = (result.folder / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert len(steps) == 3
    assert all(step["staleness_mean"] == 0 for step in steps)
    assert [step["rollout_logprob_abs_diff"] for step in steps] == [0.0] * 3
    assert [step["rollout_logprob_abs_diff_max"] for step in steps] == [0.0] * 3
    assert [step["ratio_mean"] for step in steps] == [1.0] * 3
