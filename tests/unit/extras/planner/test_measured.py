"""Tests of the rates that are measured from a run's steps, and of the advice that follows from them."""

from dataclasses import replace

import pytest

from services.extras.planner.advice import advise
from services.extras.planner.inputs import (
    Geometric,
    Measured,
    Setting,
    TooFewStepsError,
    rates_of,
    waited_fraction,
    with_overrides,
)
from services.extras.planner.simulation import predict

SETTING = Setting(
    trainer_gpus=1, rollouts=1, slots=64, max_staleness=1, groups_per_step=8, group_size=8
)
LENGTHS = {64: 100, 128: 60, 256: 30, 512: 10}


def steps(count=12, **changes):
    """Returns steps of a run whose bottleneck is generation."""
    base_step = {
        "seconds": 2.0,
        "trainer_wait_s": 1.2,
        "seconds_total": 0.8,
        "response_tokens": 6_000.0,
        "samples": 50.0,
        "idle_seconds_control": 0.02,
        "decode_fixed_s": 0.006,
        "decode_sample_s": 2e-5,
        "decode_max_samples": 64.0,
        "sync_ms": 120.0,
        "copy_ms": 10.0,
        "prepare_ms": 50.0,
        "transfer_ms": 20.0,
        "adopt_ms": 50.0,
        "stall_ms": 30.0,
    }
    return [{"step": float(number), **base_step, **changes} for number in range(1, count + 1)]


def test_rates_are_those_of_the_steps():
    rates = rates_of(steps(), LENGTHS, setting=SETTING)
    assert rates.train_tokens_per_s == pytest.approx(7_500)
    assert rates.decode(64) == pytest.approx(0.00728)
    assert rates.copy_s == pytest.approx(0.01)
    assert rates.transfer_s == pytest.approx(0.08)
    assert rates.stall_s == pytest.approx(0.03)
    assert rates.lengths == Measured.of_run(LENGTHS, mean_tokens=120)
    assert rates.lengths.mean() == pytest.approx(120)


def test_the_rate_of_one_gpu_counts_what_several_lose():
    two = rates_of(
        steps(),
        LENGTHS,
        setting=Setting(
            trainer_gpus=2, rollouts=1, slots=64, max_staleness=1, groups_per_step=8, group_size=8
        ),
    )
    assert two.train_tokens_per_s == pytest.approx(7_500 / 1.9)


def test_the_first_steps_say_nothing():
    slow_first = [*steps(3, seconds_total=30.0), *steps(12)[3:]]
    assert rates_of(slow_first, LENGTHS, setting=SETTING).train_tokens_per_s == pytest.approx(7_500)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_run_with_too_few_steps_is_refused(count):
    with pytest.raises(TooFewStepsError):
        rates_of(steps(count), LENGTHS, setting=SETTING)


@pytest.mark.parametrize(
    ("changes", "lengths", "words"),
    [
        ({"decode_fixed_s": None}, LENGTHS, "decode times"),
        ({"seconds_total": None}, LENGTHS, "seconds_total"),
        ({}, {}, "response lengths"),
    ],
)
def test_what_a_run_lacks_is_named(changes, lengths, words):
    with pytest.raises(TooFewStepsError, match=words):
        rates_of(steps(**changes), lengths, setting=SETTING)


def measured(**changes):
    """Returns steps with the predicted duration, and their rates."""
    rates = rates_of(steps(), LENGTHS, setting=SETTING)
    now = predict(rates, SETTING)
    share = {"trainer_wait_s": now.step_s - now.train_s}
    return steps(seconds=now.step_s, **{**share, **changes}), rates


def test_advice_names_the_bottleneck_and_a_remedy():
    steps_of_run, rates = measured()
    advice = advise(steps_of_run, rates, SETTING, gpus=3)
    assert advice.is_trusted
    assert advice.changes
    assert advice.changes[0].gain > 1.05
    keys = {change.key for change in advice.changes}
    assert keys <= {
        "rollout.replicas",
        "algorithm.max_staleness",
        "rollout.max_running_samples",
    }
    assert f"{100 * waited_fraction(steps_of_run):.0f} %" in advice.message()
    assert all(change.key in advice.message() for change in advice.changes)


def test_nothing_is_promised_where_the_prediction_is_off():
    _, rates = measured()
    advice = advise(steps(seconds=60.0, trainer_wait_s=40.0), rates, SETTING)
    assert not advice.is_trusted
    assert advice.changes == ()
    assert advice.bottleneck == "generation"
    assert advice.remedy() == ""


def test_the_advice_does_not_deny_a_better_placement():
    steps_of_run, rates = measured()
    advice = replace(advise(steps_of_run, rates, SETTING), changes=())
    assert "No change" in replace(advice, placement_gains={"colocated": 0.9}).remedy()
    assert "No change" not in replace(advice, placement_gains={"colocated": 1.3}).remedy()


def test_given_rates_replace_others():
    _, rates = measured()
    changed_rates = with_overrides(
        rates,
        {"stall_s": 0.5, "lengths": {"geometric": {"mean_tokens": 9, "max_tokens": 20}}},
    )
    assert changed_rates.stall_s == 0.5
    assert changed_rates.lengths == Geometric(mean_tokens=9, max_tokens=20)
    assert changed_rates.decode == rates.decode


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (["a"], "^rates "),
        ({"speed": 3}, "rates .*train_tokens_per_s.*speed"),
        ({"stall_s": "fast"}, "stall_s must be a number"),
        ({"stall_s": True}, "stall_s must be a number"),
        ({"stall_s": -1}, "stall_s is -1"),
        ({"train_tokens_per_s": float("inf")}, "train_tokens_per_s is inf"),
        ({"decode": {"fixed_s": 1}}, "decode .*max_samples, sample_s"),
        ({"lengths": {}}, "^lengths "),
        ({"lengths": {"uniform": {}}}, "^lengths .*uniform"),
        ({"lengths": {"histogram": {"a": 1}}}, "lengths.histogram"),
        ({"lengths": {"histogram": {64: 0}}}, "^lengths"),
    ],
)
def test_given_nonsense_is_refused_with_its_key(document, words):
    _, rates = measured()
    with pytest.raises(ValueError, match=words):
        with_overrides(rates, document)


@pytest.mark.parametrize(
    ("waited_part", "idle_part", "bottleneck", "helps"),
    [
        (0.44, 0.05, "generation", "rollout.replicas"),
        (0.6, 0.0, "generation", "rollout.replicas"),
        (0.02, 0.6, "training", "trainer.world_size"),
        (0.41, 0.5, "neither", "algorithm.max_staleness"),
        (0.05, 0.05, "neither", "algorithm.max_staleness"),
    ],
)
def test_the_remedy_is_for_the_side_that_is_short(waited_part, idle_part, bottleneck, helps):
    steps_of_run, rates = measured()
    seconds = steps_of_run[0]["seconds"]
    steps_of_run = [
        {**step, "trainer_wait_s": waited_part * seconds, "rollout_idle_s": idle_part * seconds}
        for step in steps_of_run
    ]
    advice = advise(steps_of_run, rates, SETTING, gpus=100)
    assert advice.bottleneck == bottleneck

    others = {"rollout.replicas", "trainer.world_size", "algorithm.max_staleness"} - {helps}
    if bottleneck == "generation":  # a higher max_staleness lets generation run further ahead
        others -= {"algorithm.max_staleness"}
    assert not {change.key for change in advice.changes} & others


def test_without_rates_the_side_that_waits_is_named_and_nothing_is_advised():
    steps_of_run, _ = measured()
    advice = advise(steps_of_run, None, SETTING, gpus=100)
    assert (advice.bottleneck, advice.now, advice.changes) == ("generation", None, ())
    assert not advice.is_trusted
    assert f"{100 * waited_fraction(steps_of_run):.0f} %" in advice.message()
    assert advice.remedy() == ""


@pytest.mark.parametrize(("waited_part", "both"), [(0.98, 0.96), (0.4, 0.38), (0.11, 0.09)])
def test_two_sides_that_are_idle_at_once_do_not_wait_for_each_other(waited_part, both):
    """In live runs, a reward of 1 s made the trainer wait 98 % and left the rollouts idle 100 %."""
    steps_of_run, rates = measured()
    seconds = steps_of_run[0]["seconds"]
    idle = {"trainer_wait_s": waited_part * seconds, "rollout_idle_s": 0.98 * seconds}
    advice = advise([{**step, **idle} for step in steps_of_run], rates, SETTING)
    assert advice.bottleneck == "neither"
    assert advice.both_waited == pytest.approx(both, abs=0.001)
    assert ("rewards" in advice.message()) is (both >= 0.1)
    assert advice.is_trusted is (both < 0.1)
    assert advice.remedy() == "" or both < 0.1


@pytest.mark.parametrize(
    ("gpus", "is_advised"),
    [(2, False), (None, False), (0, False), (3, True)],
    ids=["none free", "unknown", "no GPUs", "one free"],
)
def test_only_gpus_that_there_are_are_advised(gpus, is_advised):
    steps_of_run, rates = measured()
    keys = {change.key for change in advise(steps_of_run, rates, SETTING, gpus=gpus).changes}
    assert ("rollout.replicas" in keys) is is_advised
