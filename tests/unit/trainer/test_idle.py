"""Tests that idle time between steps is attributed to reasons."""

import pytest

from services.common.telemetry import metrics
from services.common.telemetry.metrics import IdleClock


@pytest.fixture
def now(monkeypatch):
    """Returns a list whose only element is the time of a fake clock."""
    times = [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: times[0])
    return times


def test_the_first_step_waited_for_nothing(now):
    assert IdleClock().step_begins({"no_data": 3.0}) == {}


def test_what_the_run_did_not_wait_for_went_into_its_control(now):
    clock = IdleClock()
    clock.step_ended()
    now[0] = 7.0
    waits = {"weight_sync": 4.0, "checkpoint": 0.5}
    assert clock.step_begins(waits) == {**waits, "control": 2.5}
    clock.step_ended()
    now[0] = 8.0
    assert clock.step_begins({"no_data": 1.5}) == {"no_data": 1.5, "control": 0.0}


def test_groups_that_are_trained_early_take_from_the_wait_for_the_others(now):
    clock = IdleClock()
    clock.step_ended()
    with clock.working():
        now[0] = 3.0
    now[0] = 7.0
    assert clock.step_begins({"no_data": 5.0, "weight_sync": 1.0}) == {
        "no_data": 2.0,
        "weight_sync": 1.0,
        "control": 1.0,
    }
    clock.step_ended()
    now[0] = 8.0
    assert clock.step_begins({"no_data": 1.0})["no_data"] == 1.0, "it was counted once"
