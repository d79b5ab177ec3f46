"""A run that lost every one of its processes trains what an unbroken one trains."""

import json
import sqlite3

import pytest

from tests.helpers.cli import descendants, started, train
from tests.helpers.ledger_check import check_run

pytestmark = pytest.mark.timeout(400)

SYNCHRONOUS = (
    "algorithm.max_staleness=0",
    "trainer.steps=12",
    "trainer.checkpoint.every=3",
    "limits.max_restarts=20",
)


def trained(state) -> dict[int, list[tuple[int, int]]]:
    """Groups and rows that each step trained."""
    with sqlite3.connect(state / "slipstream.db") as connection:
        rows = connection.execute("SELECT step, groups_json FROM steps ORDER BY step").fetchall()
    return {step: sorted((g[0], g[1]) for g in json.loads(groups)) for step, groups in rows}


def test_a_run_that_lost_everything_trains_the_same_samples(plumbing, tmp_path):
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    assert train(plumbing, unbroken, *SYNCHRONOUS).code == 0
    settings = [part for override in SYNCHRONOUS for part in ("--set", override)]
    arguments = ("run", plumbing, "--state-directory", broken, *settings)
    with started(*arguments, until=r"step +5/") as (process, lines):
        for victim in descendants(process).values():
            victim.kill()
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0, "".join(lines) + out
    assert trained(broken) == trained(unbroken)
    assert check_run(broken)["rewinds"] >= 1
