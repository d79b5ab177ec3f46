"""The time between steps is explained."""

import pytest

from services.trainer.ranks import idle
from services.trainer.ranks.idle import IdleClock


@pytest.fixture
def now(monkeypatch):
    """A clock that stands still unless it is set."""
    times = [0.0]
    monkeypatch.setattr(idle.time, "perf_counter", lambda: times[0])
    return times


def test_the_first_step_waited_for_nothing(now):
    assert IdleClock().step_begins() == {}


def test_what_is_not_explained_was_spent_without_data(now):
    clock = IdleClock()
    clock.step_ended()
    now[0] = 1.0
    with clock("weight_sync"):
        now[0] = 2.0
    now[0] = 4.0
    with clock("weight_sync"):
        now[0] = 5.0
    with clock("checkpoint"):
        now[0] = 5.5
    now[0] = 7.0
    assert clock.step_begins() == {"weight_sync": 4.0, "checkpoint": 0.5, "no_data": 2.5}
    clock.step_ended()
    now[0] = 8.0
    assert clock.step_begins() == {"no_data": 1.0}
