"""Mixtures of data sets: shares by weight in every batch, epochs by size, and resumption from a position."""

import pytest

from services.controller.rules.prompts import Mixture, PromptOrder

ROWS = {"train.easy": 7, "train.hard": 40, "train.rare": 3}


def rows_of(mixture, count, **options):
    order = PromptOrder(mixture, seed=3, shuffle=True, **options)
    return [order.next_row() for _ in range(count)]


def test_without_weights_an_epoch_has_every_row_once():
    rows = rows_of(Mixture(ROWS), 100)
    assert sorted(rows[:50]) == sorted(rows[50:]) == list(range(50))
    assert rows[:50] != rows[50:]


def test_every_batch_has_each_sets_share():
    mixture = Mixture(ROWS, {"train.easy": 0.5, "train.hard": 3, "train.rare": 1.5})
    rows = rows_of(mixture, 1000)
    for begin in range(0, 1000, 20):
        splits = [mixture.place(row)[0] for row in rows[begin : begin + 20]]
        counts = [splits.count(split) for split in ROWS]
        assert all(abs(count - share) <= 1 for count, share in zip(counts, (2, 12, 6), strict=True))


def test_each_set_has_separate_epochs():
    mixture = Mixture(ROWS, {"train.easy": 1, "train.hard": 1, "train.rare": 1})
    easy = [row for row in rows_of(mixture, 420) if row < 7]
    assert len(easy) == 140
    for begin in range(0, 140, 7):
        assert sorted(easy[begin : begin + 7]) == list(range(7))


@pytest.mark.parametrize(
    "weights", [None, {"train.easy": 0.1, "train.hard": 0.7, "train.rare": 0.2}]
)
def test_a_mixture_resumes_at_its_position(weights):
    mixture = Mixture(ROWS, weights)
    rows = rows_of(mixture, 300)
    for position in (1, 49, 50, 123, 299):
        assert rows_of(mixture, 300 - position, position=position) == rows[position:]


def test_a_position_far_ahead_is_found_at_once():
    mixture = Mixture({"train.a": 10**6, "train.b": 10**9}, {"train.a": 1, "train.b": 2})
    counts = mixture.taken(3 * 10**12)
    assert counts == [10**12, 2 * 10**12]


def test_rows_know_their_set():
    mixture = Mixture(ROWS)
    assert [mixture.place(row) for row in (0, 6, 7, 46, 47, 49)] == [
        ("train.easy", 0),
        ("train.easy", 6),
        ("train.hard", 0),
        ("train.hard", 39),
        ("train.rare", 0),
        ("train.rare", 2),
    ]


def test_an_empty_set_is_named():
    with pytest.raises(ValueError, match=r"data\.train\.hard has no rows"):
        Mixture({"train.easy": 1, "train.hard": 0})


def test_one_set_has_the_order_that_it_had_before_there_were_several():
    assert rows_of(Mixture({"train": 50}), 5) == rows_of(Mixture({"train.only": 50}), 5)
