"""Choice of the next weight version to evaluate, and the states of evaluations."""

import pytest

from services.controller.rules.evaluation import (
    TRANSITIONS,
    EvaluationQueue,
    EvaluationState,
    EvaluationStateError,
    StartedEvaluation,
    checked,
    is_periodic,
)


def test_periodic_versions_are_multiples():
    versions = range(-1, 11)
    assert [version for version in versions if is_periodic(version, 5)] == [5, 10]
    assert not any(is_periodic(version, every) for version in versions for every in (-1, 0))


def test_one_evaluation_is_made_at_a_time():
    turns = EvaluationQueue()
    first, second = StartedEvaluation(1, 1, "periodic"), StartedEvaluation(2, 2, "manual")
    turns.enqueue(first)
    turns.enqueue(second)
    assert (turns.current, turns.next) == (first, second)
    turns.move(EvaluationState.RUNNING)
    turns.move(EvaluationState.OK)
    turns.finish_current()
    assert (turns.current, turns.next) == (second, None)
    assert turns.state is EvaluationState.QUEUED
    turns.move(EvaluationState.MISSED)
    turns.finish_current()
    assert turns.current is None


def test_the_newest_waits_behind_the_current_one_but_never_in_place_of_a_final_one():
    turns = EvaluationQueue()
    replaced = [
        turns.enqueue(StartedEvaluation(version, version, reason))
        for version, reason in ((1, "periodic"), (2, "periodic"), (3, "final"), (4, "periodic"))
    ]
    assert replaced == [None, None, StartedEvaluation(2, 2, "periodic"), None]
    assert turns.current == StartedEvaluation(1, 1, "periodic")
    assert turns.next == StartedEvaluation(3, 3, "final")


@pytest.mark.parametrize("before", EvaluationState)
def test_an_evaluation_changes_only_to_the_states_that_may_follow(before):
    for after in EvaluationState:
        if after in TRANSITIONS[before]:
            assert checked(before, after) is after
        else:
            with pytest.raises(EvaluationStateError):
                checked(before, after)


def test_an_evaluation_that_has_not_ended_is_not_removed():
    turns = EvaluationQueue()
    turns.enqueue(StartedEvaluation(1, 1, "periodic"))
    with pytest.raises(EvaluationStateError):
        turns.finish_current()
