"""Least load, and the prefixes that rollouts hold."""

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
    assert placement.choose("g", {}.get) == "b"
    placement.assigned("b")
    placement.assigned("b")
    placement.finished("a")
    placement.finished("a")
    assert placement.choose("g", {}.get) == "a"
    assert Placement().choose("g", {}.get) is None


def test_a_group_that_was_put_aside_goes_back_while_load_allows():
    for loads, chosen in (
        ({"a": 1, "b": 0}, "a"),
        ({"a": 2, "b": 0}, "b"),
        ({"a": 20, "b": 16}, "a"),
        ({"a": 21, "b": 16}, "b"),
    ):
        placement = placed(loads)
        placement.put_aside("g", "a", version=4)
        assert placement.choose("g", {"a": 4, "b": 4}.get) == chosen


def test_a_prefix_of_other_weights_is_worth_nothing():
    placement = placed({"a": 1, "b": 0})
    placement.put_aside("g", "a", version=4)
    assert placement.choose("g", {"a": 5, "b": 5}.get) == "b"


def test_a_prefix_is_used_once_and_a_rollout_that_is_gone_holds_none():
    placement = placed({"a": 1, "b": 0})
    placement.put_aside("g", "a", version=4)
    placement.put_aside("h", "gone", version=4)
    versions = {"a": 4, "b": 4, "gone": 4}
    assert [placement.choose("g", versions.get) for _ in range(2)] == ["a", "b"]
    assert placement.choose("h", versions.get) == "b"
    placement.finished("gone")


def test_a_rollout_that_is_removed_gets_nothing_and_what_it_had_may_end():
    placement = Placement()
    for name in ("a", "b"):
        placement.add(name)
    placement.assigned("b")
    placement.send_away("b")
    placement.remove("b")
    placement.finished("b")
    assert (placement.num_present, placement.least_loaded(2)) == (1, ["a"])
