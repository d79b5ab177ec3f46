"""Processes of a training run are killed at random; the run goes on, and its ledger closes."""

import pytest

from tests.faults.kills import run_and_kill

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


def test_a_run_survives_a_few_kills(tmp_path):
    facts = run_and_kill(tmp_path, seed=0, kills=4, steps=40)
    assert facts["killed"]


@pytest.mark.nightly
def test_a_run_survives_a_dozen_kills(tmp_path):
    facts = run_and_kill(tmp_path, seed=1)
    assert sum(facts["killed"].values()) >= 8


_TURNS = "topology.placement=colocated"


def test_a_run_in_turns_survives_kills_of_both_sides(tmp_path):
    facts = run_and_kill(
        tmp_path, 2, _TURNS, kills=3, steps=40, victims=("trainer", "rollout-0", "rollout-1")
    )
    assert facts["killed"]


@pytest.mark.nightly
@pytest.mark.parametrize("changes", [(), ("algorithm.max_staleness=0",), ("trainer.world_size=2",)])
def test_a_run_in_turns_survives_a_dozen_kills(tmp_path, changes):
    facts = run_and_kill(tmp_path, 3, _TURNS, *changes)
    assert sum(facts["killed"].values()) >= 8


@pytest.mark.nightly
@pytest.mark.parametrize("max_staleness", [1, 4])
def test_a_mixed_run_survives_a_dozen_kills(tmp_path, max_staleness):
    mixed = ("topology.placement=mixed", f"algorithm.max_staleness={max_staleness}")
    facts = run_and_kill(tmp_path, 4, *mixed)
    assert sum(facts["killed"].values()) >= 8
