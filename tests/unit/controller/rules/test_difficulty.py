"""Prompt difficulty: deferred prompts, how long they are deferred, and their stored history."""

import pytest

from services.common.runspec.data import CurriculumSpec
from services.controller.rules.difficulty import Difficulty, PromptRate
from services.controller.rules.prompts import Mixture, PromptOrder

SPEC = CurriculumSpec(retry_after_steps=10)


def seen(*observed, rows=6, spec=SPEC):
    difficulty = Difficulty(rows, spec)
    for row, rewards in observed:
        difficulty.observe(row, rewards, step=5)
    return difficulty


@pytest.mark.parametrize(
    ("rewards", "why"), [([1.0, 1.0], "solved"), ([0.0, 0.0], "hopeless"), ([1.0, 0.0], None)]
)
def test_rows_that_teach_nothing_are_skipped_for_a_while(rewards, why):
    difficulty = seen((3, rewards))
    assert difficulty.is_skipped(3, step=14) == (why is not None)
    assert not difficulty.is_skipped(3, step=15)
    assert not difficulty.is_skipped(2, step=5)
    expected = {"solved": 0, "hopeless": 0} | ({why: 1} if why else {})
    assert difficulty.count_skipped(step=14) == expected
    assert difficulty.count_skipped(step=15) == {"solved": 0, "hopeless": 0}


def test_a_prompt_is_not_given_up_before_its_tries():
    spec = SPEC.model_copy(update={"min_tries": 2})
    assert not seen((1, [1.0]), spec=spec).is_skipped(1, step=5)
    assert seen((1, [1.0]), (1, [1.0]), spec=spec).is_skipped(1, step=5)


def test_success_is_a_running_mean():
    difficulty = seen((0, [0.0, 1.0]), (0, [1.0, 1.0]))
    assert difficulty.take_changes() == (PromptRate(0, 0.75, 2, 0),)
    assert difficulty.take_changes() == ()


def test_a_group_without_a_reward_is_ignored():
    difficulty = seen((0, []), (1, [float("nan")]))
    assert difficulty.take_changes() == ()


def test_one_try_after_another_is_counted_once():
    difficulty = seen((0, [0.0]), (0, [0.0]), (1, [1.0]), (0, [1.0]))
    assert difficulty.count_skipped(step=6) == {"solved": 1, "hopeless": 0}


def test_another_controller_resumes_from_stored_histories():
    difficulty = seen((0, [0.0]), (2, [1.0]), (3, [0.5]))
    later = Difficulty(6, SPEC, rates=difficulty.take_changes())
    assert [later.is_skipped(row, step=8) for row in range(4)] == [True, False, True, False]
    assert later.count_skipped(step=8) == difficulty.count_skipped(step=8)
    assert (
        Difficulty(2, SPEC, rates=[PromptRate(5, 1.0, 1, 9)]).count_skipped(step=0)["solved"] == 0
    )


def test_skipped_rows_return_at_their_time():
    difficulty = seen((0, [1.0]), (4, [0.0]))
    order = PromptOrder(Mixture({"train": 6}), seed=0, shuffle=False, difficulty=difficulty)
    assert [order.next_row(step=6) for _ in range(8)] == [1, 2, 3, 5, 1, 2, 3, 5]
    assert [order.next_row(step=15) for _ in range(6)] == [0, 1, 2, 3, 4, 5]


def test_if_all_rows_are_skipped_one_returns_before_its_time():
    difficulty = seen(*((row, [1.0]) for row in range(6)))
    order = PromptOrder(Mixture({"train": 6}), seed=0, shuffle=False, difficulty=difficulty)
    assert {order.next_row(step=6) for _ in range(6)} == set(range(6))


def test_a_million_prompts_take_ten_bytes_each():
    difficulty = Difficulty(1_000_000, SPEC)
    parts = (difficulty._rates, difficulty._tries, difficulty._until)
    assert sum(column.itemsize * len(column) for column in parts) == 10_000_000
