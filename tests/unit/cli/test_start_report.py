"""Tests of the report of a run's start."""

import json
from pathlib import Path
from typing import Any

from services.cli.follow import START, StartReport

PHASES = {"rollout-0": {"imports": 4.0, "starting the engine": 30.0}}


def event(second: int, **data: Any) -> dict[str, Any]:
    return {"time": f"2026-01-01T00:00:{second:02}Z", "data": data}


def test_parts_end_with_their_events_and_the_first_step_completes_the_report(
    tmp_path: Path,
) -> None:
    report = StartReport({"checks": 5.0})
    assert not report.process("StateChanged", event(10, to="STARTING"))
    assert not report.process("WorkersReady", event(44, start_seconds=PHASES))
    assert not report.process("WeightsPublished", event(46, version=0))
    assert report.process("StepCommitted", event(50, step=1))
    assert not report.process("StepCommitted", event(52, step=2))
    expected = {"checks": 5.0, "workers": 34.0, "first weights": 2.0, "first step": 4.0}
    assert report.seconds == expected
    first, second = report.text().splitlines()
    assert "45.0" in first
    assert "rollout-0" in second
    assert "starting the engine 30.0" in second
    report.write(tmp_path)
    written = json.loads((tmp_path / START).read_text(encoding="utf-8"))
    assert written == {"seconds": expected, "workers": PHASES}


def test_a_run_that_resumes_has_no_report() -> None:
    report = StartReport()
    assert not report.process("StateChanged", event(10, to="RECOVERING"))
    assert not report.process("WorkersReady", event(20, absent=[]))
    assert not report.process("StepCommitted", event(30, step=7))
