"""Random kills of a training run's processes: the run continues, its ledger closes, its bound holds."""

import pytest

from tests.faults.kills import GROUPS, KINDS, MORE_VICTIMS, SERVERS, run_and_kill

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]


def test_a_run_survives_a_few_kills(tmp_path):
    facts = run_and_kill(tmp_path, seed=0, kills=4, steps=20)
    assert facts["killed"]


def test_a_run_with_segments_keeps_its_bound_when_the_transferqueue_dies(tmp_path):
    facts = run_and_kill(
        tmp_path, 1, "segments", kills=3, steps=20, victims=("transferqueue",), timeout_s=600.0
    )
    assert facts["killed"]


def test_a_run_in_turns_survives_kills_of_both_sides(tmp_path):
    facts = run_and_kill(
        tmp_path, 2, "colocated", kills=3, steps=20, victims=("trainer-0", "rollout-0", "rollout-1")
    )
    assert facts["killed"]


@pytest.mark.nightly  # on each commit, test_run_roles kills a worker of such a group
def test_a_run_survives_kills_of_its_training_groups(tmp_path):
    facts = run_and_kill(tmp_path, 4, GROUPS, kills=3, steps=20, victims=MORE_VICTIMS[GROUPS])
    assert facts["killed"]


def test_a_run_with_attached_servers_survives_their_kills_freezes_and_cut_links(tmp_path):
    facts = run_and_kill(tmp_path, 5, SERVERS, kills=6, steps=10)
    assert facts["faults"]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_any_kind_survives_its_kills_within_its_bound(tmp_path, kind):
    facts = run_and_kill(tmp_path, 3, kind)
    assert sum(facts["killed"].values()) + sum(facts.get("faults", {}).values()) >= 8
