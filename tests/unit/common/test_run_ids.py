"""Ids of runs, which sort by the order of their creation."""

import re

import pytest

from services.common.fields import new_run_id

_FORM = re.compile("run_[0-9a-f]{12}7[0-9a-f]{3}[89ab][0-9a-f]{15}")


@pytest.mark.parametrize(
    "after",
    [
        "",
        "run_",
        "run_01",
        "run_sorting-digits",
        "an-imported-run",
        "run_0x12",
        "run_" + "g" * 32,
        "run_" + "1" * 33,
        "run_" + "\u0661" * 32,
        "run_" + "f" * 32,
    ],
)
def test_an_id_follows_any_other_id(after: str) -> None:
    assert _FORM.fullmatch(new_run_id(after))


def test_ids_sort_after_those_of_a_clock_that_was_ahead() -> None:
    ahead = "run_0fffffffffff7" + "f" * 19
    assert ahead < new_run_id(ahead) < new_run_id(new_run_id(ahead))
