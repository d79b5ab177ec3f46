"""Tests of the ledger, which holds every issued prompt in exactly one state."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.controller.rules.ledger import Group, GroupState, Ledger, LedgerError, LedgerState


def test_a_trained_group_goes_through_all_states():
    ledger = Ledger(max_attempts=3)
    group = ledger.issue(row=7, position=1)
    ledger.lease(group, "rollout-0", version=2, now=1.0)
    ledger.confirm(group)
    ledger.complete(group, oldest_version=2)
    ledger.train([group])
    ledger.consume([group])
    assert ledger.counts() == {
        "issued": 1,
        **{state.value: 0 for state in GroupState},
        "consumed": 1,
    }
    assert ledger.get(group.group_id) is None


def test_a_group_is_never_trained_twice():
    ledger = Ledger(max_attempts=3)
    group = ledger.issue(row=0, position=1)
    ledger.lease(group, "rollout-0", version=0, now=0.0)
    ledger.complete(group, oldest_version=0)
    ledger.train([group])
    with pytest.raises(LedgerError):
        ledger.train([group])


def test_a_parked_group_with_tokens_still_counts_as_started():
    ledger = Ledger(max_attempts=3)
    group, untouched = ledger.issue(row=0, position=1), ledger.issue(row=1, position=2)
    ledger.lease(group, "rollout-0", version=4, now=0.0)
    ledger.interrupt(group)
    assert ledger.started_groups() == [group]
    assert group.oldest_version == 4
    assert untouched not in ledger.started_groups()


def test_results_of_an_older_attempt_are_not_found():
    ledger = Ledger(max_attempts=3)
    group = ledger.issue(row=0, position=1)
    ledger.lease(group, "rollout-0", version=0, now=0.0)
    assert ledger.retry(group, "lost")
    assert ledger.get(group.group_id, attempt=1) is None
    assert ledger.get(group.group_id, attempt=2) is group


def test_a_prompt_is_quarantined_after_the_last_try():
    ledger = Ledger(max_attempts=2)
    group = ledger.issue(row=0, position=1)
    ledger.lease(group, "rollout-0", version=0, now=0.0)
    assert ledger.retry(group, "reward_timeout")
    ledger.lease(group, "rollout-1", version=0, now=0.0)
    assert not ledger.retry(group, "reward_timeout")
    assert ledger.counts()["quarantined"] == 1
    assert ledger.reasons() == {"reward_timeout": 1}


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 30)), max_size=120))
def test_the_ledger_closes_after_any_sequence_of_events(events):
    ledger = Ledger(max_attempts=2)
    groups = []
    actions = [
        lambda g: ledger.lease(g, "w", version=0, now=0.0),
        ledger.confirm,
        lambda g: ledger.complete(g, oldest_version=0),
        lambda g: ledger.retry(g, "lost"),
        lambda g: ledger.train([g]),
        lambda g: ledger.consume([g]),
        lambda g: ledger.drop(g, "stale"),
        ledger.interrupt,
        ledger.park_lost,
        ledger.requeue,
        lambda g: ledger.put_back([g]),
    ]
    for kind, index in events:
        if kind == len(actions) or not groups:
            groups.append(ledger.issue(row=len(groups), position=len(groups)))
            continue
        group = groups[index % len(groups)]
        if ledger.get(group.group_id) is None:
            continue
        try:
            actions[kind](group)
        except LedgerError:
            continue
    counts = ledger.counts()
    assert counts["issued"] == len(groups)
    assert ledger.num_admitted == len(groups) - counts["dropped"] - counts["quarantined"]


def test_changes_restore_the_same_ledger():
    ledger = Ledger(max_attempts=3)
    leased_group, dropped = (ledger.issue(row=row, position=row + 1) for row in range(2))
    ledger.lease(leased_group, "rollout-0", version=4, now=0.0)
    ledger.drop(dropped, "stale")
    change = ledger.take_changes()
    assert [group.sequence for group in change.groups] == [0]
    assert [group.reason for group in change.ended] == ["stale"]
    restored = Ledger.restore(
        LedgerState(
            groups=[
                Group(**facts._asdict() | {"state": GroupState(facts.state)})
                for facts in change.groups
            ],
            num_issued=change.num_issued,
            position=change.position,
            ended=change.counts,
            reasons=change.reasons,
        ),
        max_attempts=3,
        now=9.0,
    )
    assert restored.counts() == ledger.counts()
    assert restored.position == 2
    assert ledger.take_changes().groups == ()


def test_a_prompt_that_outlives_too_many_workers_is_quarantined():
    ledger = Ledger(max_attempts=3)
    group = ledger.issue(row=0, position=1)
    for _ in range(7):
        ledger.lease(group, "rollout-0", version=0, now=0.0)
        assert ledger.park_lost(group)
    ledger.lease(group, "rollout-0", version=0, now=0.0)
    assert not ledger.park_lost(group)
    assert ledger.reasons() == {"worker_lost": 1}


def test_tokens_from_before_a_new_beginning_are_fenced_off_and_those_of_an_interruption_are_not():
    ledger = Ledger(max_attempts=9)
    group = ledger.issue(0, position=1)
    ledger.lease(group, "rollout-0", version=4, now=0.0)
    ledger.interrupt(group, num_tokens=7)
    ledger.lease(group, "rollout-0", version=5, now=1.0)
    assert ledger.park_lost(group)
    assert (group.attempt, group.first_attempt, group.oldest_version) == (3, 1, 4)
    for begin_again in (ledger.requeue, lambda group: ledger.retry(group, "reward_error")):
        ledger.lease(group, "rollout-0", version=6, now=2.0)
        begin_again(group)
        assert group.first_attempt == group.attempt
        assert (group.oldest_version, group.num_tokens) == (-1, 0)


def test_a_group_whose_worker_died_is_as_old_as_what_that_may_have_stored():
    ledger = Ledger(max_attempts=3)
    group = ledger.issue(0, position=1)
    ledger.lease(group, "rollout-0", version=4, now=0.0)
    ledger.confirm(group)
    assert ledger.park_lost(group)
    assert ledger.started_groups() == [group], "a batch waits for it, if it must"
    ledger.lease(group, "rollout-1", version=5, now=1.0)
    assert (group.oldest_version, group.attempt) == (4, 2)
