"""Placement of groups by load and by the prefixes that rollouts have cached."""

from services.controller.rules.placement import Placement


def placed(loads: dict[str, int]) -> Placement:
    placement = Placement()
    for name, load in loads.items():
        placement.add(name)
        for _ in range(load):
            placement.assigned(name)
    return placement


def test_a_new_group_goes_to_the_least_loaded():
    placement = placed({"a": 3, "b": 1, "c": 2})
    assert placement.choose("", room=4) == "b"
    placement.assigned("b")
    placement.assigned("b")
    placement.finished("a")
    placement.finished("a")
    assert placement.choose("", room=4) == "a"
    assert Placement().choose("", room=4) is None


def test_a_parked_group_returns_to_its_rollout_while_slots_are_free():
    for loads, chosen in (
        ({"a": 3, "b": 0}, "a"),
        ({"a": 4, "b": 0}, "b"),
        ({"a": 5, "b": 5}, "a"),
        ({"a": 6, "b": 5}, "b"),
    ):
        assert placed(loads).choose("a", room=4) == chosen


def test_a_group_of_a_rollout_that_is_gone_goes_anywhere():
    placement = placed({"a": 1, "b": 0})
    assert placement.choose("gone", room=4) == "b"
    placement.finished("gone")
    placement.exclude("a")
    assert placement.choose("a", room=4) == "b"


def test_a_rollout_that_is_removed_gets_nothing_and_what_it_had_may_end():
    placement = Placement()
    for name in ("a", "b"):
        placement.add(name)
    placement.assigned("b")
    placement.exclude("b")
    placement.remove("b")
    placement.finished("b")
    assert (placement.num_present, placement.least_loaded(2)) == (1, ["a"])
