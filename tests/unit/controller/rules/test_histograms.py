"""Histograms of integers."""

import pytest

from services.controller.rules.learning import bound_of, histogram
from services.extras.planner.inputs import _lower_bound_of


@pytest.mark.parametrize(
    ("value", "bound"), [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (7, 8), (9, 12), (13, 16)]
)
def test_a_number_is_in_the_bucket_that_reaches_up_to_the_next_bound(value, bound):
    assert bound_of(value) == bound


def test_a_bucket_starts_after_the_previous_one():
    buckets = {}
    for value in range(1000):
        buckets.setdefault(bound_of(value), value)
    assert {bound: _lower_bound_of(bound) for bound in buckets} == buckets


def test_every_number_is_counted_once_and_is_within_a_third_of_its_bound():
    assert sum(histogram(range(1000)).values()) == 1000
    assert histogram([5, 6, 6, 40]) == {"6": 3, "48": 1}
    assert all(value <= bound_of(value) < value * 1.5 for value in range(3, 1000))
