"""Tests of samplers, which choose batches from the groups of ready samples."""

import pytest

from services.transferqueue.index.leasing import fifo, whole_groups


def test_fifo_takes_the_oldest_or_nothing() -> None:
    ready = iter("abc")
    assert fifo(ready, 2) == [0, 1]
    assert list(ready) == ["c"]
    assert fifo("a", 2) is None


def test_a_late_member_never_mixes_two_groups() -> None:
    late_first_sample = "aaabbbba"
    assert whole_groups(late_first_sample, 4, group_size=4) == [3, 4, 5, 6]
    assert whole_groups(late_first_sample, 8, group_size=4) == [3, 4, 5, 6, 0, 1, 2, 7]
    assert whole_groups(late_first_sample[:6], 4, group_size=4) is None


def test_a_batch_is_whole_groups() -> None:
    with pytest.raises(ValueError, match="group_size"):
        whole_groups("a", 3, group_size=2)
