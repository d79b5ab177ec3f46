"""Tests of the number of groups that occupy all slots, computed from the spread of response lengths."""

import pytest

from services.controller.rules.placement import SlotUsage


def test_before_the_first_group_each_member_counts_as_a_place():
    use = SlotUsage(256, 8)
    assert use.slots_per_group == 8
    assert use.num_groups(1) == 32
    assert use.num_groups(3) == 96


@pytest.mark.parametrize(
    ("lengths", "slots"), [((100,) * 8, 8.0), ((800, *(100,) * 7), 1.875), ((1,), 1.0), ((), 8.0)]
)
def test_a_group_takes_its_tokens_over_its_longest_member(lengths, slots):
    use = SlotUsage(256, 8)
    if lengths:
        use.finished(lengths)
    assert use.slots_per_group == slots


def test_an_empty_response_takes_no_place_and_each_engine_has_a_group():
    use = SlotUsage(2, 8)
    use.finished((0, 0))
    assert use.slots_per_group == 8
    assert use.num_groups(5) == 5


def test_old_groups_are_forgotten():
    use = SlotUsage(256, 8)
    for lengths in ((800, *(100,) * 7), *[(100,) * 8] * 256):
        use.finished(lengths)
    assert use.slots_per_group == 8
