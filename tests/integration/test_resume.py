"""A run that lost all its processes trains the same as an uninterrupted one."""

import json
import sqlite3

import pytest

from tests.helpers.cli import descendants, started, train
from tests.helpers.ledger_check import check_run
from tests.helpers.plumbing import write_sft

pytestmark = pytest.mark.timeout(400)

SAVED = ("trainer.checkpoint.every=3", "limits.max_restarts=20")
# 39 rows, so that twelve steps of four prompts end in the second epoch of the smaller set.
SETS = (
    *SAVED,
    "algorithm.max_staleness=0",
    "data.train={a: {source: jsonl, path: prompts.jsonl, weight: 2}, "
    "b: {source: jsonl, path: prompts.jsonl, limit: 7, weight: 1}}",
    "data.epochs=1.2",
    "trainer.steps=null",
    "data.curriculum={solved_from: null, hopeless_to: -1}",
)


def trained(state) -> dict[int, list[tuple[int, int]]]:
    """Returns the groups and rows that each step trained."""
    with sqlite3.connect(state / "slipstream.db") as connection:
        rows = connection.execute("SELECT step, groups_json FROM steps ORDER BY step").fetchall()
    return {step: sorted((g[0], g[1]) for g in json.loads(groups)) for step, groups in rows}


def tries(state) -> dict[int, int]:
    """Returns how often the curriculum saw each prompt."""
    with sqlite3.connect(state / "slipstream.db") as connection:
        return dict(connection.execute("SELECT row, tries FROM prompt_rates").fetchall())


def break_one_of_two(spec, folder, *overrides):
    """Trains twice, once with all processes killed at step 5; returns both state directories."""
    unbroken, broken = folder / "unbroken", folder / "broken"
    result = train(spec, unbroken, *overrides)
    assert result.code == 0, result.out + result.err
    settings = [argument for override in overrides for argument in ("--set", override)]
    arguments = ("run", spec, "--state-directory", broken, *settings)
    with started(*arguments, until=r"step +5/") as (process, lines):
        for victim in descendants(process).values():
            victim.kill()
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0, "".join(lines) + out
    return unbroken, broken


@pytest.mark.nightly
def test_a_run_of_several_sets_that_lost_everything_trains_the_same_samples(plumbing, tmp_path):
    unbroken, broken = break_one_of_two(plumbing, tmp_path, *SETS)
    assert [*trained(unbroken)] == [*range(1, 13)]
    assert trained(broken) == trained(unbroken)
    assert check_run(broken)["rewinds"] >= 1
    # The curriculum's state is restored; prompts that were trained again are counted again.
    tries_unbroken, again = tries(unbroken), tries(broken)
    assert sum(tries_unbroken.values()) == 48
    assert tries_unbroken.keys() == again.keys()
    assert all(again[row] >= count for row, count in tries_unbroken.items())


@pytest.mark.nightly
def test_fine_tuning_that_lost_everything_trains_the_same_answers(tmp_path):
    synchronous = "algorithm={loss: sft, max_staleness: 0}"
    unbroken, broken = break_one_of_two(write_sft(tmp_path), tmp_path, *SAVED, synchronous)
    assert trained(broken) == trained(unbroken)
    assert check_run(broken)["rewinds"] >= 1
