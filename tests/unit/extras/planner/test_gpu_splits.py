"""Tests that the planner recommends the split of GPUs with the highest predicted rate."""

from dataclasses import replace

import pytest

from services.extras.planner.gpu_splits import GpuCapacity, plan_splits
from services.extras.planner.inputs import DecodeTime, Geometric, Rates, Setting

RATES = Rates(
    train_tokens_per_s=10_000.0,
    decode=DecodeTime(fixed_s=0.005, sample_s=1e-4, max_samples=32),
    lengths=Geometric(mean_tokens=100, max_tokens=400),
)
BASE = Setting(
    trainer_gpus=1, rollouts=1, slots=32, max_staleness=1, groups_per_step=8, group_size=4
)


def _in_turns(way):
    return way.placement == "colocated"


def planned(rates=RATES, *, gpus=4, bounds=(0, 1, 4), **changes):
    room = GpuCapacity(
        gpus_per_node=changes.pop("gpus_per_node", 8),
        gpus=gpus,
        **{k: changes.pop(k) for k in ("engine_gpus",) if k in changes} or {"engine_gpus": 1},
    )
    arguments = {"slots": lambda max_staleness, rollouts: 32, "max_slots": 32, **changes}
    return plan_splits(rates, BASE, room=room, bounds=bounds, **arguments)


def test_every_gpu_is_used_and_every_lag_is_tried():
    plan = planned()
    ways = {
        (s.setting.trainer_gpus, s.setting.rollouts, s.setting.max_staleness) for s in plan.splits
    }
    assert ways == {(t, 4 - t, max_staleness) for t in (1, 2, 3) for max_staleness in (0, 1, 4)}


@pytest.mark.parametrize(("train_tokens_per_s", "trainer_gpus"), [(500.0, 3), (1e6, 1)])
def test_the_slower_side_gets_more(train_tokens_per_s, trainer_gpus):
    plan = planned(replace(RATES, train_tokens_per_s=train_tokens_per_s))
    assert plan.best.setting.trainer_gpus == trainer_gpus


def test_the_recommendation_is_close_to_the_best():
    plan = planned()
    most = max(split.prediction.samples_per_s for split in plan.splits)
    assert plan.best.prediction.samples_per_s >= 0.95 * most


def test_of_equals_the_least_lag_is_taken():
    slow = replace(RATES, train_tokens_per_s=200.0)
    assert planned(slow, bounds=(1, 2, 4)).best.setting.max_staleness == 1


def test_engines_of_two_gpus_take_two_each():
    plan = planned(gpus=6, engine_gpus=2)
    assert {(s.setting.trainer_gpus, s.setting.rollouts) for s in plan.splits} == {(2, 2), (4, 1)}


def test_more_slots_are_tried_if_they_fit():
    rates = replace(RATES, decode=DecodeTime(fixed_s=0.005, sample_s=0.0, max_samples=1000))
    plan = planned(rates, gpus=2, slots=lambda max_staleness, rollouts: 8, max_slots=16)
    assert plan.best.setting.slots == 16


def test_what_cannot_be_is_left_out_with_its_reason():
    plan = planned(refused=lambda way: "too small" if way.trainer_gpus == 1 else "")
    assert plan.refused == {"1": "too small"}
    assert all(split.setting.trainer_gpus > 1 for split in plan.splits)


def test_too_few_gpus_are_refused_with_the_figures():
    with pytest.raises(ValueError, match="--gpus"):
        planned(gpus=2, engine_gpus=2)


def test_a_plan_without_a_fitting_split_gives_the_reason():
    with pytest.raises(ValueError, match="with 3 for the trainer: needs 90 GB"):
        planned(gpus=4, refused=lambda way: "needs 90 GB")
    # One GPU suffices if trainer and rollouts share it, so only its memory excludes this plan.
    with pytest.raises(ValueError, match="1 shared for the trainer: needs 90 GB"):
        planned(gpus=1, refused=lambda way: "needs 90 GB", may_colocate=lambda way: True)


def test_many_gpus_are_not_tried_one_by_one():
    assert len(GpuCapacity(gpus=512, engine_gpus=1, gpus_per_node=8).trainer_sizes()) <= 8


def test_turns_on_all_gpus_are_tried_where_they_may_be():
    plan = planned(gpus=4, bounds=(0, 1), may_colocate=lambda way: way.max_staleness < 2)
    turns = [split.setting for split in plan.splits if split.setting.is_colocated]
    assert [
        (s.trainer_gpus, s.rollouts, s.colocated_rollouts, s.placement) for s in turns[::2]
    ] == [
        *((1, 4, 1, "mixed"), (2, 4, 2, "mixed"), (3, 4, 3, "mixed"), (4, 4, 4, "colocated")),
    ]
    assert [s.max_staleness for s in turns] == 4 * [0, 1]
    assert all(s.gpus == 4 for s in turns)
    assert not [split for split in planned().splits if split.setting.is_colocated]


def test_one_gpu_is_used_at_once_or_in_turns():
    splits = planned(gpus=1, bounds=(0,), may_colocate=_in_turns).splits
    settings = [split.setting for split in splits]
    assert [(s.trainer_gpus, s.rollouts, s.gpus) for s in settings] == 2 * [(1, 1, 1)]
    assert [s.shares_gpu for s in settings] == [True, False]
    assert [s.is_colocated for s in settings] == [False, True]
    (split,) = planned(gpus=1, bounds=(0,)).splits
    assert split.setting.shares_gpu


def test_turns_are_recommended_if_gpu_switches_cost_little():
    quick = replace(RATES, gpu_switch_s=0.0, transfer_s=0.0, copy_s=0.0, stall_s=0.0)
    slow = replace(RATES, gpu_switch_s=60.0)
    assert planned(quick, gpus=2, bounds=(0,), may_colocate=_in_turns).best.setting.is_colocated
    assert not planned(slow, gpus=2, bounds=(0,), may_colocate=_in_turns).best.setting.is_colocated


def test_a_trainer_has_one_node_at_most_or_whole_nodes():
    room = GpuCapacity(gpus=40, engine_gpus=1, gpus_per_node=8)
    sizes = {size for size in range(1, 40) if size <= 8 or size % 8 == 0}
    assert sizes.issuperset(room.trainer_sizes())
    assert any(size > 8 for size in room.trainer_sizes())
    plan = planned(gpus=12, gpus_per_node=4, may_colocate=lambda way: True)
    assert {split.setting.trainer_gpus for split in plan.splits} <= {1, 2, 3, 4, 8}
    turns = {split.setting.trainer_gpus for split in plan.splits if split.setting.is_colocated}
    assert max(turns) <= 4, "a trainer of several nodes takes no turns with rollouts"
