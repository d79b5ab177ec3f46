"""Groups with more members than a rollout has slots, through the whole system."""

import json

import pytest

pytestmark = pytest.mark.timeout(240)


def test_rollouts_share_groups_that_exceed_the_free_slots_of_one_and_nothing_is_lost(
    plumbing, system
):
    result = system.train(
        plumbing,
        "rollout.max_running_samples=2",
        "rollout.partial_rollout=true",
        "rollout.segment_tokens=2",
    )
    assert result.code == 0, result.out + result.err
    assert result.summary["prompts"]["consumed"] == result.summary["prompts"]["issued"] == 12
    steps = [
        json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert [step["samples"] for step in steps] == [16, 16, 16]
