"""Tests that the tests and figures of ``docs/guarantees.md`` exist."""

import json
import re

import pytest

from tests.helpers.pages import ROOT

PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
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
    results = json.loads((ROOT / "bench" / "results" / "faults.json").read_text())
    failed = {(run["commit"], str(run["seed"])) for run in results["runs"] if "failure" in run}
    assert set(re.findall(r"^\| `(\w{8})` \| (\d+) \|", PAGE, re.MULTILINE)) == failed
    ((runs, kills),) = re.findall(r"at least (\d+) runs with ([\d,]+) random SIGKILLs", PAGE)
    assert int(runs) <= len(results["runs"])
    assert int(kills.replace(",", "")) <= sum(results["kills"].values())
