"""sort4 is learned with a real engine: the whole system, in the engine's environment."""

import importlib.util

import pytest

from bench.rollout.learning import meets_bars, train

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
    run = train(0, engine, tmp_path)
    assert meets_bars(run), run
