"""sort4 is learned with a real engine: the whole system, in the engine's environment."""

import importlib.util
import json

import pytest

from tests.helpers.cli import run_module

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
    results = tmp_path / "learning.json"
    # The bars are met behind a hundred steps and some: of the benchmark's 400 these are enough.
    options = ("--seeds", "0", "--steps", "240", "--engine", engine)
    run_module("bench.rollout.learning", *options, "--out", results)
    found = json.loads(results.read_text())[engine]
    assert found["meets_bars"], found
