"""Whole runs that replay the experts of a real engine, so that the trainer's logprobs differ less from it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cli import REPOSITORY, run_module
from tests.helpers.engines import installed

pytestmark = pytest.mark.timeout(600)
_MEASURED = REPOSITORY / "bench" / "results" / "routing-cpu.json"


def _measured(folder: Path, *ways: str) -> dict[str, Any]:
    out = folder / "routing.json"
    run_module("bench.routing", *ways, "--steps", "4", "--out", out)
    content: dict[str, Any] = json.loads(out.read_text())
    return content


def _difference(results: dict[str, Any], way: str) -> float:
    assert results[way]["staleness_mean"] == 1
    assert 0 < results[way].get("routing_differs", 0) < 0.3
    return float(results[way]["rollout_logprob_abs_diff"])


@pytest.mark.parametrize("engine", installed("vllm"))
def test_a_run_with_replay_has_half_of_the_difference_that_was_measured_without(
    tmp_path: Path, engine: str
) -> None:
    results = _measured(tmp_path, f"{engine},replay")
    without = json.loads(_MEASURED.read_text())[f"{engine},compare"]["rollout_logprob_abs_diff"]
    assert _difference(results, f"{engine},replay") <= without / 2


@pytest.mark.nightly
@pytest.mark.parametrize("engine", installed("vllm", "sglang"))
def test_replay_halves_the_difference(tmp_path: Path, engine: str) -> None:
    results = _measured(tmp_path, f"{engine},compare", f"{engine},replay")
    without = _difference(results, f"{engine},compare")
    assert _difference(results, f"{engine},replay") <= without / 2
