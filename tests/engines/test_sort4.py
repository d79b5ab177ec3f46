"""sort4 is learned with a real engine: the whole system, in the engine's environment."""

import importlib.util

import pytest

from tests.helpers.cli import SORT4, train

pytestmark = pytest.mark.timeout(1200)


def engines(*names: str) -> list[object]:
    """Those that are installed; the others are skipped."""
    return [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                importlib.util.find_spec(name) is None, reason=f"{name} is not installed here"
            ),
        )
        for name in names
    ]


@pytest.mark.parametrize("engine", engines("vllm", "sglang"))
def test_training_learns_to_sort_with_responses_cut_every_two_tokens(tmp_path, engine):
    done = train(
        SORT4,
        tmp_path,
        f"rollout.engine={engine}",
        "rollout.replicas=1",
        "rollout.partial_rollout=true",
        "rollout.segment_tokens=2",
        "algorithm.max_staleness=2",
        timeout=1100,
    )
    assert done.code == 0, done.out + done.err
    summary = done.summary
    assert summary["heldout"]["greedy"] >= 0.88
    assert summary["heldout"]["sampled"] >= 0.75
    assert summary["weight_version"] == 50
