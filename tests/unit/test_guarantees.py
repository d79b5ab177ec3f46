"""Tests that the tests and figures of ``docs/guarantees.md`` exist."""

import json
import re
from typing import Any

import pytest

from tests.helpers.pages import ROOT

PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
_TEXT = " ".join(PAGE.split())
_ROW = re.compile(r"^\| `(tests/[\w/]+\.py)` \| (.+) \|$", re.MULTILINE)
HELD = [
    (file, test) for file, tests in _ROW.findall(PAGE) for test in re.findall(r"`(\w+)`", tests)
]


def test_each_guarantee_names_its_tests() -> None:
    sections = re.findall(r"\]\(#([\w-]+)\) \|", PAGE)
    titles = {
        re.sub(r"\W", "-", title.lower()): text
        for title, text in re.findall(
            r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL
        )
    }
    assert len(sections) == 5
    for section in sections:
        assert _ROW.findall(titles[section]), section
        assert "**Mechanism.**" in titles[section]
        assert "**Prevents.**" in titles[section]


@pytest.mark.parametrize(("file", "test"), HELD)
def test_a_test_that_the_page_names_exists(file: str, test: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    assert re.search(rf"^(?:async )?(?:def )?{test}\b", text, re.MULTILINE)


def test_the_page_reports_every_failed_run_of_the_fault_suite() -> None:
    results = _results("faults")
    failed = {(run["commit"], str(run["seed"])) for run in results["runs"] if "failure" in run}
    assert set(re.findall(r"^\| `(\w{8})` \| (\d+) \|", PAGE, re.MULTILINE)) == failed
    ((runs, kills),) = re.findall(r"at least (\d+) runs with ([\d,]+) random SIGKILLs", PAGE)
    assert int(runs) <= len(results["runs"])
    assert int(kills.replace(",", "")) <= sum(results["kills"].values())


def test_the_figures_of_the_fault_suite_are_those_of_its_results() -> None:
    results = _results("faults")
    runs, kills, commit, kinds = _figures(
        r"The (\d+) runs with (\d+) kills at `(\w+)` are of all (\d+) kinds"
    )
    newest = [run for run in results["runs"] if run["commit"] == commit]
    assert [str(len(newest)), str(sum(sum(run["killed"].values()) for run in newest))] == [
        runs,
        kills,
    ]
    assert str(len({run["kind"] for run in newest})) == kinds
    assert not any("failure" in run for run in newest)
    (millions,) = _figures(r"([\d.]+) million trained tokens were checked")
    assert f"{sum(run['trained_tokens'] for run in newest) / 1e6:.2f}" == millions

    kills, faults, num_runs, commit = _figures(
        r"(\d+) kills and (\d+) other faults in (two|three|four) runs at `(\w+)`"
    )
    attached = [
        run
        for run in results["runs"]
        if run["commit"] == commit and run["kind"].startswith("attached servers")
    ]
    assert len(attached) == {"two": 2, "three": 3, "four": 4}[num_runs]
    for field, number in (("killed", kills), ("faults", faults)):
        assert str(sum(sum(run[field].values()) for run in attached)) == number

    kinds, commit = _figures(r"also provokes (\d+) kinds of faults .*? at `(\w+)` all ended as")
    assert str(len(results["table"][commit])) == kinds


def test_the_other_figures_are_those_of_their_results() -> None:
    numbers = _figures(r"after each, the other rollouts served the new version within ([\d.]+) s")
    recovery = _results("weightsync")["recovery nccl 1+3, 1024 MB"]
    assert [f"{recovery['max_s']:.1f}"] == numbers
    assert recovery["kills"] == 20
    staleness, versions = _figures(r"a mean staleness of ([\d.]+) whose .*? all (\d+) versions")
    replay = _results("replay")
    assert f"{replay['staleness_mean']:.1f}" == staleness
    assert str(replay["equal_versions"]) == str(replay["steps"]) == versions
    noticed, low, high, longest = _figures(
        r"within ([\d.]+) s, and the run trained its next step from the checkpoint after (\d+) to (\d+) s "
        r"\(median, at most ([\d.]+)\)"
    )
    *layouts, largest = _results("rank-kills")["layouts"].values()
    assert max(layout["noticed_max_s"] for layout in layouts) <= float(noticed)
    assert {round(layout["recovered_p50_s"]) for layout in layouts} == {int(low), int(high)}
    assert f"{max(layout['recovered_max_s'] for layout in layouts):.1f}" == longest
    for layout in layouts:
        assert layout["phases"] == {"broadcast": 5, "step": 5}
    steps, broadcasts, noticed, median, longest = _figures(
        r"it killed twenty, (\d+) in a step and (\d+) during a broadcast: each cause named its rank within "
        r"([\d.]+) s, and the next step came after ([\d.]+) s \(median, at most ([\d.]+)\)"
    )
    assert largest["num_kills"] == 20
    assert largest["phases"] == {"broadcast": int(broadcasts), "step": int(steps)}
    assert largest["noticed_max_s"] <= float(noticed)
    assert f"{largest['recovered_p50_s']:.1f}" == median
    assert f"{largest['recovered_max_s']:.1f}" == longest


def _results(name: str) -> Any:
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())


def _figures(pattern: str) -> list[str]:
    """Returns what the page states in a sentence."""
    match = re.search(pattern, _TEXT)
    assert match is not None, pattern
    return [*match.groups()]
