"""Order of prompts: every row once per epoch, and the same order at every start, without a stored list."""

import pytest

from services.controller.rules.prompts import Mixture, PromptOrder, shuffled


@pytest.mark.parametrize("num_rows", [1, 2, 3, 10, 97, 1000])
def test_an_epoch_has_every_row_once(num_rows):
    order = PromptOrder(Mixture({"train": num_rows}), seed=5, shuffle=True)
    for _ in range(2):
        assert sorted(order.next_row() for _ in range(num_rows)) == list(range(num_rows))


def test_epochs_and_seeds_have_orders_of_their_own():
    def rows(seed):
        order = PromptOrder(Mixture({"train": 100}), seed=seed, shuffle=True)
        return [order.next_row() for _ in range(200)]

    first = rows(1)
    assert first == rows(1)
    assert len({tuple(first[:100]), tuple(first[100:]), tuple(rows(2)[:100])}) == 3


def test_an_order_resumes_at_its_position():
    whole = PromptOrder(Mixture({"train": 50}), seed=1, shuffle=True)
    rows = [whole.next_row() for _ in range(80)]
    later = PromptOrder(Mixture({"train": 50}), seed=1, shuffle=True, position=30)
    assert [later.next_row() for _ in range(50)] == rows[30:]


def test_rows_move_as_far_as_in_a_random_order():
    num_rows = 10_000
    moved = [abs(shuffled(index, num_rows, key=9) - index) for index in range(num_rows)]
    assert sum(moved) / num_rows / num_rows == pytest.approx(1 / 3, abs=0.01)
