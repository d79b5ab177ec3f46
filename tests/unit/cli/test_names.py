"""Tests of the lookup of runs by name and by an unambiguous prefix of their id."""

import pytest

from services.cli.api import ApiError
from services.cli.api_calls import find_run, short_ids

IDS = [f"run_0198{digits:0<28}" for digits in ("aaa1", "aab2", "bcd3")]


class Run:
    def __init__(self, run_id: str, name: str) -> None:
        self.id, self.name = run_id, name


class Page:
    def __init__(self, items: list[Run]) -> None:
        self.items = items


class Controller:
    """Fake client of a controller with three runs, newest first, of which two have the same name."""

    async def call(self, operation):
        runs = [Run(IDS[2], "sort"), Run(IDS[1], "sort"), Run(IDS[0], "count")]
        matching = [run for run in runs if operation.name in ("", run.name)]
        return Page(matching[: operation.page_size])


@pytest.mark.parametrize(
    ("text", "number"),
    [(IDS[1], 1), ("sort", 2), ("count", 0), ("run_0198aaa", 0), ("0198b", 2), ("run_0198aab2", 1)],
)
async def test_a_name_is_the_newest_of_it_and_a_prefix_is_enough(text, number):
    assert await find_run(Controller(), text) == IDS[number]


@pytest.mark.parametrize(
    ("text", "message"),
    [("run_0198aa", "2 runs"), ("sart", "Did you mean 'sort'"), ("run_9", "list")],
)
async def test_unknown_and_ambiguous_run_names_are_rejected(text, message):
    with pytest.raises(ApiError, match=message):
        await find_run(Controller(), text)


def test_short_ids_differ():
    names = short_ids(IDS)
    assert len(set(names)) == 3
    assert max(map(len, names)) == 11
