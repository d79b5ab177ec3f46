"""Whole runs that learn sort4 with a real engine, in the engine's environment."""

import json

import pytest

from tests.helpers.cli import run_module
from tests.helpers.engines import installed

pytestmark = pytest.mark.timeout(1200)


@pytest.mark.parametrize("engine", installed("vllm", "sglang"))
def test_training_learns_to_sort_with_responses_cut_every_two_tokens(tmp_path, engine):
    results = tmp_path / "learning.json"
    # Runs meet the bars after little more than 100 steps, so 240 of the benchmark's 400 steps are enough.
    options = ("--seeds", "0", "--steps", "240", "--engine", engine)
    run_module("bench.rollout.learning", *options, "--out", results)
    report = json.loads(results.read_text())[engine]
    assert report["meets_bars"], report


@pytest.mark.parametrize("engine", installed("vllm"))
def test_training_learns_to_sort_with_servers_of_which_one_is_killed_and_restarted(
    tmp_path, engine
):
    results = tmp_path / "fleet.json"
    run_module("bench.rollout.fleet", "--seeds", "0", "--kill", "--out", results)
    content = json.loads(results.read_text())
    assert content["engine"] == f"{engine}-server"
    assert content["meets_bars"], content
    assert content["runs"][0]["kills"] >= 1
