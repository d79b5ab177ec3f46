"""Tests that predictions for one shared GPU agree with the runs that were measured on one.

Rates are those of each side alone: the trainer's from the synchronous run, in which nothing is generated
while it works; the decode times fit that run's speed. All other runs are predicted.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations, islice
from random import Random
from typing import Any

import pytest

from services.common.runspec.run import RunSpec, default_slots
from services.extras.planner.advice import advise
from services.extras.planner.gpu_splits import (
    GpuCapacity,
    on_one_gpu,
    other_placements,
    plan_splits,
)
from services.extras.planner.inputs import (
    DecodeTime,
    Geometric,
    Lognormal,
    Rates,
    Setting,
    rates_of,
    setting_of,
)
from services.extras.planner.simulation import predict
from tests.helpers.cli import REPOSITORY
from tests.helpers.specs import spec_with

SETTING = Setting(
    trainer_gpus=1, rollouts=1, slots=128, max_staleness=0, groups_per_step=16, group_size=8
)
_APART = 1.1
"""Ratio of two measured speeds above which their order is certain: hosts differ by less."""


def results(name: str) -> Mapping[str, Any]:
    return json.loads((REPOSITORY / "bench" / "results" / name).read_text(encoding="utf-8"))


def alone(run: Mapping[str, Any], decode: DecodeTime, lengths: Geometric | Lognormal) -> Rates:
    """Returns the rates of a synchronous run."""
    return Rates(
        train_tokens_per_s=run["response_tokens_per_step"] / run["trainer_works_s"],
        decode=decode,
        lengths=lengths,
        step_s=run["waits"]["control"],
        copy_s=run["sync_ms"]["prepare"] / 1000,
        transfer_s=run["sync_ms"]["transfer"] / 1000,
        stall_s=run["sync_ms"]["stall"] / 1000,
        gpu_switch_s=0.05,
    )


def duel() -> tuple[Rates, dict[Setting, float]]:
    """Returns rates and measured samples/s of 1.31 billion parameters on an H100, geometric lengths."""
    runs = results("one-gpu-duel.json")
    synchronous = runs["synchronous, seventh H100 host"]
    decode = DecodeTime(fixed_s=0.0018, sample_s=4e-5, max_samples=1024)
    measured = {
        way(0): synchronous["samples_per_s"],
        way(1): runs["lag 1, seventh H100 host"]["samples_per_s"],
        way(4): runs["lag 4, seventh H100 host"]["samples_per_s"],
        way(1, shares_gpu=False): runs["in turns, lag 1, first H100 host"]["samples_per_s"],
    }
    return alone(synchronous, decode, Geometric(mean_tokens=693, max_tokens=2048)), measured


def gsm8k() -> tuple[Rates, dict[Setting, float]]:
    """Returns rates and measured samples/s of 1.5 billion parameters on an H200, answers to GSM8K."""
    runs = {name: run["facts"] for name, run in results("gsm8k-1.5b.json")["runs"].items()}
    synchronous = runs["synchronous, seed 0"]
    decode = DecodeTime(fixed_s=0.0026, sample_s=3e-5, max_samples=1024)
    measured = {way(lag): runs[name]["samples_per_s"] for lag, name in (
        (0, "synchronous, seed 0"), (1, "lag 1, seed 0"), (4, "lag 4, seed 0"),
    )}  # fmt: skip
    lengths = Lognormal(median_tokens=303, sigma=0.35, max_tokens=1024)
    return alone(synchronous, decode, lengths), measured


def way(max_staleness: int, *, shares_gpu: bool = True) -> Setting:
    """Returns a setting whose two sides use the GPU at once, or by turns."""
    return replace(
        SETTING,
        max_staleness=max_staleness,
        slots=SETTING.samples_per_step * (max_staleness + 1),
        partial_rollout=max_staleness > 0,
        shares_gpu=shares_gpu,
        colocated_rollouts=0 if shares_gpu else 1,
    )


@pytest.mark.parametrize("arms", [duel, gsm8k])
def test_predictions_have_the_order_and_about_the_size_of_what_was_measured(arms: Any) -> None:
    rates, measured = arms()
    predicted = {setting: predict(rates, setting).samples_per_s for setting in measured}
    compared = 0
    for name, other_name in combinations(measured, 2):
        if max(measured[name], measured[other_name]) < _APART * min(
            measured[name], measured[other_name]
        ):
            continue
        assert (predicted[name] > predicted[other_name]) == (measured[name] > measured[other_name])
        compared += 1
    assert compared >= 3
    for setting, speed in measured.items():
        assert predicted[setting] == pytest.approx(speed, rel=0.12), setting


def test_the_plan_of_one_gpu_recommends_what_was_fastest() -> None:
    rates, measured = duel()
    plan = plan_splits(
        rates,
        SETTING,
        room=GpuCapacity(gpus=1, engine_gpus=1, gpus_per_node=8),
        bounds=(0, 1, 4),
        slots=lambda bound, rollouts: SETTING.samples_per_step * (bound + 1),
        max_slots=640,
        may_colocate=lambda setting: setting.max_staleness < 2,
    )
    best = max(measured, key=lambda setting: measured[setting])
    assert (plan.best.setting.shares_gpu, plan.best.setting.max_staleness) == (True, 4)
    assert best.max_staleness == 4
    assert plan.now is not None
    assert plan.now.setting.shares_gpu


def test_sides_that_never_work_at_once_do_not_slow_each_other_down() -> None:
    rates, _ = duel()
    slow = replace(rates, train_slowdown=5.0, decode_slowdown=5.0)
    assert predict(rates, way(0)) == predict(slow, way(0))
    assert predict(slow, way(1)).step_s > 1.5 * predict(rates, way(1)).step_s


def test_a_trainer_that_outlasts_the_engine_is_slowed_down_while_that_decodes() -> None:
    rates = replace(duel()[0], train_tokens_per_s=8_000.0)
    limit = predict(rates, way(1))
    apart = predict(rates, replace(way(1), shares_gpu=False, colocated_rollouts=0))
    slow = rates.train_slowdown
    assert apart.train_s < limit.train_s < slow * apart.train_s
    # The engine's work of a step slows the trainer down for about as long as that lasts.
    longest = rates.decode(128) * 2048 * rates.decode_slowdown
    assert limit.train_s < apart.train_s + (slow - 1) / slow * 2 * longest


def spec_of_one_gpu() -> RunSpec:
    return spec_with(
        rollout={"engine": "vllm", "replicas": 1, "group_size": 8, "max_response_tokens": 2048},
        trainer={"prompts_per_step": 16},
        algorithm={"max_staleness": 1},
    )


def steps_of(rates: Rates, setting: Setting) -> tuple[list[dict[str, float]], dict[int, int]]:
    """Returns steps, and response lengths, as a run with these rates on one GPU reports them."""
    run = predict(rates, setting)
    beside = 1 + (rates.decode_slowdown - 1) * run.train_s / run.step_s
    step = {
        "seconds": run.step_s,
        "trainer_wait_s": run.step_s - run.train_s,
        "rollout_idle_s": run.rollout_idle * run.step_s,
        "seconds_total": run.train_s,
        "response_tokens": setting.samples_per_step * rates.lengths.mean(),
        "samples": float(setting.samples_per_step),
        "idle_seconds_control": rates.step_s,
        "decode_fixed_s": rates.decode.fixed_s * beside,
        "decode_sample_s": rates.decode.sample_s * beside,
        "decode_max_samples": float(setting.slots),
        "sync_ms": 80.0,
        "copy_ms": 1000 * rates.copy_s,
        "prepare_ms": 1000 * rates.copy_s,
        "transfer_ms": 1000 * rates.transfer_s,
        "adopt_ms": 1000 * rates.stall_s,
        "stall_ms": 1000 * rates.stall_s,
    }
    lengths: dict[int, int] = {}
    for length in islice(rates.lengths.draws(Random(1)), 4000):
        bound = 64 * -(-length // 64)
        lengths[bound] = lengths.get(bound, 0) + 1
    return [{"step": float(number), **step} for number in range(1, 14)], lengths


def test_a_run_at_lag_1_on_one_gpu_is_advised_to_use_lag_4() -> None:
    spec = spec_of_one_gpu()
    setting = on_one_gpu(setting_of(spec))
    assert setting is not None
    steps, lengths = steps_of(duel()[0], setting)
    advice = advise(
        steps,
        rates_of(steps, lengths, setting=setting),
        setting,
        candidates=other_placements(spec, setting),
        gpus=1,
        slots=lambda bound: default_slots(spec, max_staleness=bound, replicas=1),
    )
    assert advice.is_trusted, advice.message()
    (change,) = [change for change in advice.changes if change.key == "algorithm.max_staleness"]
    assert change.after == 4
    assert change.gain > 1.2
    assert set(advice.placement_gains) == {"colocated"}
    _, measured = duel()
    gain = measured[way(4)] / measured[way(1)]
    assert change.gain == pytest.approx(gain, rel=0.1)
    # A prediction that does not know that the GPU is shared promises more than was measured.
    apart = replace(setting, shares_gpu=False)
    blind = advise(
        steps, rates_of(steps, lengths, setting=apart), apart, slots=lambda bound: 128 * (bound + 1)
    )
    assert blind.changes[0].gain > 1.1 * gain


def test_the_other_placement_of_turns_on_one_gpu_is_at_once() -> None:
    spec = spec_with(
        rollout={"engine": "vllm", "replicas": 1},
        topology={"placement": "colocated"},
        algorithm={"max_staleness": 1},
    )
    (other,) = other_placements(spec, setting_of(spec))
    assert other.shares_gpu
    assert other.gpus == 1
