"""Choice of the next weight version to evaluate."""

from services.controller.rules.evaluation import EvaluationQueue, StartedEvaluation, is_periodic


def test_periodic_versions_are_multiples():
    versions = range(-1, 11)
    assert [version for version in versions if is_periodic(version, 5)] == [5, 10]
    assert not any(is_periodic(version, every) for version in versions for every in (-1, 0))


def test_one_evaluation_is_made_at_a_time():
    turns = EvaluationQueue()
    first, second = StartedEvaluation(1, "periodic"), StartedEvaluation(2, "manual")
    turns.enqueue(first)
    turns.enqueue(second)
    assert (turns.current, turns.next) == (first, second)
    turns.finish_current()
    assert (turns.current, turns.next) == (second, None)
    turns.finish_current()
    assert turns.current is None


def test_the_newest_waits_behind_the_current_one_but_never_in_place_of_a_final_one():
    turns = EvaluationQueue()
    for version, reason in ((1, "periodic"), (2, "periodic"), (3, "final"), (4, "periodic")):
        turns.enqueue(StartedEvaluation(version, reason))
    assert turns.current == StartedEvaluation(1, "periodic")
    assert turns.next == StartedEvaluation(3, "final")
