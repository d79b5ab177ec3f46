"""Tests of the copies in a weight store."""

from services.controller.run.weights.shelf import Shelf, StoredCopy


def copy(version, base=-1, num_bytes=100):
    return StoredCopy(
        name=f"{base}-{version}",
        version=version,
        base_version=base,
        manifests=("digest",),
        num_bytes=num_bytes,
    )


def names(path):
    return None if path is None else [step.name for step in path]


def test_a_rollout_without_weights_reads_the_whole_version():
    shelf = Shelf([copy(1), copy(2, 1, 10)])
    assert names(shelf.path(-1, 1)) == ["-1-1"]
    assert shelf.path(-1, 2) is None


def test_a_rollout_that_is_behind_reads_the_changes_step_by_step():
    shelf = Shelf([copy(1), copy(2, 1, 10), copy(3, 2, 10), copy(5, 3, 10)])
    assert names(shelf.path(1, 5)) == ["1-2", "2-3", "3-5"]
    assert names(shelf.path(3, 5)) == ["3-5"]
    assert shelf.path(4, 5) is None


def test_the_whole_version_is_read_if_it_is_smaller_than_the_changes():
    shelf = Shelf([copy(1), copy(2, 1, 60), copy(3, 2, 60), copy(3)])
    assert names(shelf.path(1, 3)) == ["-1-3"]
    assert names(shelf.path(2, 3)) == ["2-3"]


def test_the_oldest_copies_go_but_neither_the_newest_nor_those_that_are_read():
    shelf = Shelf([copy(1), copy(2), copy(3), copy(4)])
    assert shelf.retain(2, newest=4, loading_names={"-1-1"}) == ["-1-1", "-1-4"]
    assert shelf.retain(1, newest=4, loading_names={"-1-1"}) == ["-1-1", "-1-4"]
    assert shelf.retain(1, newest=4, loading_names=()) == ["-1-4"]


def test_a_damaged_copy_is_not_read_again():
    shelf = Shelf([copy(1)])
    shelf.drop("-1-1")
    assert shelf.path(-1, 1) is None


def test_a_copy_of_the_version_that_is_being_written_stays():
    shelf = Shelf([copy(1), copy(2, 1), copy(2), copy(3, 2)])
    assert shelf.retain(1, newest=2, loading_names=()) == ["1-2", "-1-2", "2-3"]


def test_the_whole_copy_of_the_newest_version_stays_longest():
    shelf = Shelf([copy(2), copy(2, 1), copy(3), copy(3, 2)])
    assert shelf.retain(3, newest=9, loading_names=()) == ["-1-2", "2-3", "-1-3"]
    assert shelf.retain(1, newest=9, loading_names=()) == ["-1-3"]
