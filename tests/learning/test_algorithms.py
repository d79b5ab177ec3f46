"""Every algorithm learns sort4 in the whole system; the control without a correction does not."""

import json

import pytest

from tests.helpers.cli import run_module

pytestmark = [pytest.mark.nightly, pytest.mark.learning, pytest.mark.timeout(7200)]


def test_held_out_accuracy_is_within_its_bounds(tmp_path):
    results = tmp_path / "learning.json"
    run_module("bench.learning", "--seeds", "3", "--out", results)
    entries = json.loads(results.read_text())
    assert entries
    assert [entry for entry in entries if not entry["holds"]] == []
