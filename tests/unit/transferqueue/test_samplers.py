"""Samplers: pure policies over candidates."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.transferqueue.index.samplers import Candidate, balanced_order, fifo, whole_groups


def candidates(*groups: str) -> list[Candidate]:
    return [Candidate(index, group, 0) for index, group in enumerate(groups)]


def test_fifo_takes_the_oldest_or_nothing() -> None:
    assert fifo(candidates("a", "b", "c"), 2) == [0, 1]
    assert fifo(candidates("a"), 2) is None


def test_a_late_member_never_mixes_two_groups() -> None:
    late_first_sample = candidates("a", "a", "a", "b", "b", "b", "b", "a")
    assert whole_groups(late_first_sample, 4, group_size=4) == [3, 4, 5, 6]
    assert whole_groups(late_first_sample, 8, group_size=4) == [3, 4, 5, 6, 0, 1, 2, 7]
    assert whole_groups(late_first_sample[:6], 4, group_size=4) is None


def test_a_batch_is_whole_groups() -> None:
    with pytest.raises(ValueError, match="whole groups"):
        whole_groups(candidates("a"), 3, group_size=2)


@given(
    num_ranks=st.integers(1, 8),
    num_each=st.integers(0, 12),
    seed=st.integers(0, 1000),
)
def test_ranks_get_equal_numbers_and_about_equal_cost(
    num_ranks: int, num_each: int, seed: int
) -> None:
    rng = random.Random(seed)
    costs = [rng.randint(1, 4096) for _ in range(num_ranks * num_each)]
    order = balanced_order(costs, num_ranks=num_ranks)
    assert sorted(order) == list(range(len(costs)))
    shares = [
        sum(costs[index] for index in order[rank * num_each : (rank + 1) * num_each])
        for rank in range(num_ranks)
    ]
    assert max(shares) - min(shares) <= max(costs, default=0)


def test_samples_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ValueError, match="divided"):
        balanced_order([1, 2, 3], num_ranks=2)
