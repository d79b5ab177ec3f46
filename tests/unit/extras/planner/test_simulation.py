"""Invariants of predicted step times."""

from dataclasses import replace
from itertools import islice, pairwise
from random import Random

import pytest

from services.extras.planner.inputs import (
    DecodeTime,
    Geometric,
    Lognormal,
    Measured,
    Rates,
    Setting,
)
from services.extras.planner.simulation import min_step_s, predict

RATES = Rates(
    train_tokens_per_s=5_000.0,
    decode=DecodeTime(fixed_s=0.005, sample_s=1e-5, max_samples=64),
    lengths=Geometric(mean_tokens=100, max_tokens=400),
    transfer_s=0.0,
    stall_s=0.0,
    copy_s=0.0,
    step_s=0.0,
)
SETTING = Setting(
    trainer_gpus=1, rollouts=1, slots=32, max_staleness=1, groups_per_step=8, group_size=4
)


def fixed(length: int) -> Measured:
    """Returns a length distribution with a single length."""
    return Measured(bounds=(length - 1, length), counts=(0, 1))


def test_a_synchronous_step_takes_generation_and_training_one_after_the_other():
    rates = replace(RATES, lengths=fixed(100))
    prediction = predict(rates, replace(SETTING, max_staleness=0))
    generating_s = 100 * rates.decode(32)
    training_s = 32 * 100 / rates.train_tokens_per_s
    assert prediction.step_s == pytest.approx(generating_s + training_s, rel=1e-3)
    assert prediction.staleness_mean == 0


def test_other_work_of_a_synchronous_step_is_added():
    rates = replace(
        RATES,
        lengths=fixed(100),
        prompt_s=0.01,
        outside_s=0.3,
        step_s=0.02,
        copy_s=0.03,
        transfer_s=0.05,
        stall_s=0.04,
    )
    bare = predict(replace(RATES, lengths=fixed(100)), replace(SETTING, max_staleness=0))
    prediction = predict(rates, replace(SETTING, max_staleness=0))
    assert prediction.step_s - bare.step_s == pytest.approx(8 * 0.01 + 0.3 + 0.14, abs=0.045)
    assert prediction.waits["weight_sync"] == pytest.approx(0.03, rel=0.2)


def test_a_step_in_turns_takes_generation_training_and_gpu_switches_one_after_the_other():
    rates = replace(RATES, lengths=fixed(100), gpu_switch_s=0.5, copy_s=0.03, transfer_s=0.05)
    turns = replace(SETTING, max_staleness=0, colocated_rollouts=1)
    prediction = predict(rates, turns)
    working_s = 100 * rates.decode(32) + 32 * 100 / rates.train_tokens_per_s
    assert prediction.step_s == pytest.approx(working_s + 0.5 + 0.08, rel=1e-2)
    assert prediction.waits["gpu_switch"] == pytest.approx(0.25, rel=0.2)
    assert prediction.waits["weight_sync"] == pytest.approx(0.25 + 0.08, rel=0.2)
    # With staleness 1 a step does not wait for its longest responses, but turns still do not overlap.
    ahead = predict(rates, replace(turns, max_staleness=1, slots=64))
    assert ahead.step_s > working_s / 2 + 0.58
    assert ahead.staleness_p95 <= 1


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@pytest.mark.parametrize("train_tokens_per_s", [2_000.0, 20_000.0])
def test_a_mixed_run_keeps_to_its_limit_and_to_its_bound(max_staleness, train_tokens_per_s):
    rates = replace(RATES, train_tokens_per_s=train_tokens_per_s, gpu_switch_s=0.1)
    mixed = replace(
        SETTING, rollouts=3, colocated_rollouts=1, max_staleness=max_staleness, slots=16
    )
    prediction = predict(rates, mixed)
    assert prediction.step_s > 0.95 * min_step_s(rates, mixed)
    assert prediction.staleness_p95 <= max_staleness
    assert prediction.step_s > 0.97 * predict(rates, replace(mixed, colocated_rollouts=0)).step_s


def test_where_places_are_short_a_trainer_that_lends_its_gpu_is_faster_than_one_that_does_not():
    busy = DecodeTime(fixed_s=1e-3, sample_s=1e-3, max_samples=64)
    rates = replace(RATES, decode=busy, train_tokens_per_s=20_000.0, gpu_switch_s=0.1)
    mixed = replace(SETTING, rollouts=3, colocated_rollouts=1, slots=16)
    assert (
        predict(rates, mixed).step_s
        < predict(rates, replace(mixed, rollouts=2, colocated_rollouts=0)).step_s
    )


def test_unfinished_groups_of_colocated_engines_continue_on_the_others():
    rates = replace(RATES, lengths=fixed(400), train_tokens_per_s=3_000.0, gpu_switch_s=0.1)
    mixed = replace(SETTING, rollouts=2, colocated_rollouts=1, slots=64, groups_per_step=4)
    prediction = predict(rates, mixed)
    waits = predict(rates, replace(mixed, partial_rollout=False))
    assert prediction.step_s < waits.step_s


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@pytest.mark.parametrize("train_tokens_per_s", [1_000.0, 5_000.0, 50_000.0])
def test_no_step_is_shorter_than_the_limit(max_staleness, train_tokens_per_s):
    rates = replace(RATES, train_tokens_per_s=train_tokens_per_s)
    for rollouts in (1, 3):
        setting = replace(SETTING, max_staleness=max_staleness, rollouts=rollouts)
        prediction = predict(rates, setting)
        assert prediction.step_s > 0.95 * min_step_s(rates, setting)
        assert 0 < prediction.share_of_limit <= 1


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_more_rollouts_make_no_run_slower(max_staleness):
    steps = [
        predict(RATES, replace(SETTING, max_staleness=max_staleness, rollouts=n)).step_s
        for n in (1, 2, 4)
    ]
    assert all(more <= 1.03 * fewer for fewer, more in pairwise(steps))


def test_more_trainer_gpus_make_no_run_slower():
    slow = replace(RATES, train_tokens_per_s=1_000.0)
    one_gpu_s, two_gpus_s = (predict(slow, replace(SETTING, trainer_gpus=n)).step_s for n in (1, 2))
    assert two_gpus_s < 0.75 * one_gpu_s


def test_asynchrony_hides_what_is_shorter():
    steps = [
        predict(RATES, replace(SETTING, max_staleness=max_staleness, slots=64)).step_s
        for max_staleness in (0, 1, 4)
    ]
    assert steps[0] > steps[1] > steps[2]


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 8])
def test_staleness_stays_within_the_lag(max_staleness):
    prediction = predict(RATES, replace(SETTING, max_staleness=max_staleness, slots=128))
    assert 0 <= prediction.staleness_mean <= prediction.staleness_p95 <= max_staleness


def test_the_same_arguments_give_the_same_prediction():
    assert predict(RATES, SETTING) == predict(RATES, SETTING)


def test_times_of_a_step_add_up():
    prediction = predict(RATES, SETTING)
    assert sum(prediction.waits.values()) + prediction.train_s == pytest.approx(
        prediction.step_s, rel=0.05
    )


def test_training_early_shortens_a_synchronous_step_alone():
    synchronous = replace(SETTING, max_staleness=0)
    early = replace(synchronous, accumulate_early=True)
    rates = replace(RATES, piece_s=0.0, train_tokens_per_s=2_000.0)
    assert predict(rates, early).step_s < 0.9 * predict(rates, synchronous).step_s


def test_an_engine_that_finishes_its_responses_first_costs_time():
    keeping = predict(RATES, replace(SETTING, max_staleness=2))
    draining = predict(RATES, replace(SETTING, max_staleness=2, partial_rollout=False))
    assert draining.step_s > keeping.step_s


def test_a_group_of_more_samples_than_places_is_shared():
    prediction = predict(RATES, replace(SETTING, rollouts=2, slots=16, group_size=24))
    assert prediction.step_s > 0


def test_beyond_the_measured_concurrency_no_gain_is_assumed():
    decode = DecodeTime(fixed_s=0.004, sample_s=1e-4, max_samples=50)
    rates = [number / decode(number) for number in (10, 50, 100, 200)]
    assert rates[0] < rates[1]
    assert rates[1] == pytest.approx(rates[2]) == pytest.approx(rates[3])


@pytest.mark.parametrize(
    "lengths",
    [
        Geometric(mean_tokens=50, max_tokens=200),
        Lognormal(median_tokens=40, sigma=0.8, max_tokens=300),
        Lognormal(median_tokens=40, sigma=0.0, max_tokens=300),
        Measured.of({32: 5, 64: 10, 96: 1}),
        Measured.of({0: 1, 1: 1}),
        Measured.of_run({12: 10, 48: 3}, mean_tokens=16.0),
        Measured.of_run({12: 10, 48: 3}, mean_tokens=20.0),
        Measured.of_run({12: 10, 48: 3}, mean_tokens=400.0),
    ],
)
def test_the_mean_is_that_of_what_is_drawn(lengths):
    drawn = list(islice(lengths.draws(Random(1)), 20_000))
    assert min(drawn) >= 1
    assert sum(drawn) / len(drawn) == pytest.approx(lengths.mean(), rel=0.03)


def test_what_a_run_measured_has_its_mean_and_lies_in_its_buckets():
    lengths = Measured.of_run({12: 10, 48: 3}, mean_tokens=16.0)
    assert lengths.mean() == pytest.approx(16.0)
    drawn = set(islice(lengths.draws(Random(1)), 20_000))
    assert {9, 10, 33} < drawn <= {*range(9, 13), *range(33, 49)}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: replace(RATES, train_tokens_per_s=0.0), "train_tokens_per_s is 0.0"),
        (lambda: replace(RATES, train_tokens_per_s=float("nan")), "train_tokens_per_s is nan"),
        (lambda: replace(RATES, stall_s=-1.0), "stall_s is -1.0"),
        (lambda: replace(RATES, decode=replace(RATES.decode, max_samples=0)), "max_samples"),
        (
            lambda: replace(RATES, decode=DecodeTime(fixed_s=0, sample_s=0, max_samples=9)),
            "decode.fixed_s",
        ),
        (lambda: replace(SETTING, rollouts=0), "rollouts is 0"),
        (lambda: replace(SETTING, max_staleness=-1), "max_staleness .*-1"),
        (lambda: Geometric(mean_tokens=1, max_tokens=9), "mean_tokens must be above 1"),
        (lambda: Lognormal(median_tokens=0, sigma=1, max_tokens=9), "median_tokens"),
        (lambda: Measured(bounds=(5, 4), counts=(1, 1)), "bounds"),
        (lambda: Measured(bounds=(5,), counts=(0,)), "counts"),
    ],
)
def test_nonsense_is_refused_with_its_name(make, words):
    with pytest.raises(ValueError, match=words):
        make()
