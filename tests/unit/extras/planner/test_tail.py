"""The bound of the longest responses against the simulation, which knows only the rules of runs."""

from dataclasses import replace

import pytest

from services.extras.planner.inputs import (
    DecodeTime,
    Geometric,
    Lognormal,
    Rates,
    Setting,
    setting_of,
)
from services.extras.planner.simulation import Simulation
from services.extras.planner.tail import tail_bound
from tests.helpers.specs import spec_with

TAILS = {
    "geometric": Geometric(mean_tokens=461, max_tokens=3072),
    "log-normal": Lognormal(median_tokens=305, sigma=0.9, max_tokens=3072),
}
SETTING = Setting(
    trainer_gpus=1, rollouts=1, slots=960, max_staleness=4, groups_per_step=24, group_size=8
)


def rates_of(lengths: Geometric | Lognormal, *, fixed_s: float) -> Rates:
    return Rates(
        train_tokens_per_s=57_000.0,
        decode=DecodeTime(fixed_s=fixed_s, sample_s=1.05e-5, max_samples=1024),
        lengths=lengths,
    )


@pytest.mark.parametrize("fixed_s", [0.0035, 0.02])
@pytest.mark.parametrize("name", TAILS)
def test_no_number_of_slots_beats_the_bound_of_the_longest_responses(name, fixed_s):
    rates = rates_of(TAILS[name], fixed_s=fixed_s)
    bound = tail_bound(rates, SETTING)
    for slots in (96, 160, 256, 512, 960):
        result = Simulation(rates, replace(SETTING, slots=slots)).run(30)
        assert result.step_s > 0.98 * bound.step_s


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
@pytest.mark.parametrize("name", TAILS)
def test_with_enough_slots_a_step_takes_what_the_longest_responses_need(name, max_staleness):
    rates = rates_of(TAILS[name], fixed_s=0.01)
    setting = replace(SETTING, max_staleness=max_staleness, slots=192 * (max_staleness + 1))
    bound, prediction = tail_bound(rates, setting), Simulation(rates, setting).run(30)
    assert bound.step_s < prediction.step_s < 1.25 * bound.step_s
    # The engine runs no more than the bound allows, though it has several times as many slots.
    running = prediction.slots_used * setting.slots
    assert 0.75 * bound.max_running < running < 1.05 * bound.max_running


def test_equal_lengths_leave_all_slots_in_use():
    rates = rates_of(Geometric(mean_tokens=400, max_tokens=1), fixed_s=0.01)
    bound = tail_bound(rates, replace(SETTING, slots=256))
    assert bound.longest_tokens == 1
    assert bound.max_running == 256


@pytest.mark.parametrize("fixed_s", [0.0035, 0.02])
def test_a_trainer_that_does_not_wait_for_the_oldest_responses_is_not_bound_by_them(fixed_s):
    rates = rates_of(TAILS["geometric"], fixed_s=fixed_s)
    bound = tail_bound(rates, SETTING)
    masked = Simulation(rates, replace(SETTING, stale_wait_s=0.0)).run(30)
    assert masked.step_s < 0.9 * bound.step_s
    assert "barrier" not in masked.waits


def test_a_longer_wait_for_the_oldest_responses_makes_longer_steps():
    rates = rates_of(TAILS["geometric"], fixed_s=0.0035)
    steps_s = [
        Simulation(rates, replace(SETTING, stale_wait_s=wait_s)).run(40).step_s
        for wait_s in (0.0, 0.8, 1.5, 180.0)
    ]
    assert steps_s == sorted(steps_s)


@pytest.mark.parametrize(
    ("algorithm", "wait_s"),
    [
        ({}, 180.0),
        ({"stale_wait_timeout_s": 1.5}, 1.5),
        ({"on_stale": "mask", "stale_wait_timeout_s": 1.5}, 0.0),
    ],
)
def test_the_setting_of_a_run_knows_how_long_its_trainer_waits(algorithm, wait_s):
    spec = spec_with(algorithm={"max_staleness": 4, **algorithm})
    assert setting_of(spec).stale_wait_s == wait_s


def test_a_negative_wait_is_refused():
    with pytest.raises(ValueError, match="stale_wait_s must be 0 or more seconds, got -1"):
        replace(SETTING, stale_wait_s=-1)
