"""Every declared algorithm, and every mode of weight sync, runs through all services for a few steps."""

import json
import math
from itertools import cycle
from typing import get_args

import pytest

from services.common.runspec.algorithm import AlgorithmSpec
from services.common.runspec.formulas import ADVANTAGES, LOSSES

pytestmark = pytest.mark.timeout(300)


AGGREGATIONS = get_args(AlgorithmSpec.model_fields["aggregation"].annotation)
SAMPLING_LOSSES = [
    name for name, kind in LOSSES.items() if not (kind.num_demonstrations or kind.distills)
]
OTHERS = (
    ("algorithm.dynamic_sampling=true", "algorithm.entropy_coefficient=0.01"),
    ("algorithm.kl={coefficient: 0.1, placement: reward, estimator: k1}",),
    ("algorithm.kl={coefficient: 0.1, estimator: k3+, target: 0.1}", "trainer.updates_per_step=2"),
    ("algorithm.overlong={buffer_tokens: 2, mask_truncated: true}",),
    ("algorithm.rejection=[{level: seq_mean, lower: 0.5, upper: 2.0}]",),
    ("algorithm.correction=decoupled", "algorithm.correction_level=sequence"),
)
# Every commit runs cpu_async and delta of these; shadow is the default of all other runs.
MODES = ("delta", "shadow", "inplace", "cpu_async")
COMBINATIONS = [
    (advantage, loss, aggregation, (f"weight_sync.mode={mode}", *settings))
    for advantage, loss, aggregation, settings, mode in zip(
        ADVANTAGES,
        cycle(SAMPLING_LOSSES),
        cycle(AGGREGATIONS),
        cycle(OTHERS),
        cycle(MODES),
        strict=False,
    )
]
# Every commit runs the estimators that need more than a group of sampled responses.
SPECIAL = {"remax", "gae"}


@pytest.mark.parametrize(
    ("advantage", "loss", "aggregation", "others"),
    [
        pytest.param(*names, marks=() if names[0] in SPECIAL else pytest.mark.nightly, id=names[0])
        for names in COMBINATIONS
    ],
)
def test_an_algorithm_runs(plumbing, system, advantage, loss, aggregation, others):
    settings = (
        f"algorithm.advantage={advantage}",
        f"algorithm.loss={loss}",
        f"algorithm.aggregation={aggregation}",
        *others,
    )
    if ADVANTAGES[advantage].idle_groups is None:  # no group is idle because of its rewards
        settings = tuple(key for key in settings if key != "algorithm.dynamic_sampling=true")
    if advantage == "none":  # it ignores rewards
        settings = tuple(key.replace("placement: reward, ", "") for key in settings)
    if advantage == "gdpo":
        settings += ("algorithm.advantage_arguments={weights: {length: 1.0}}",)
    result = system.train(plumbing, *settings)
    assert result.code == 0, result.out + result.err
    steps = [json.loads(line) for line in (result.folder / "metrics.jsonl").open()]
    assert len(steps) == 3
    assert all(math.isfinite(step["loss"]) and step["nonfinite_updates"] == 0 for step in steps)


def test_stale_samples_train_with_score_centering_alone(plumbing, system):
    settings = (
        "algorithm.loss=reinforce",
        "algorithm.correction=none",
        "algorithm.max_staleness=2",
    )
    result = system.train(plumbing, *settings, "algorithm.score_centering=4")
    assert result.code == 0, result.out + result.err
    steps = [json.loads(line) for line in (result.folder / "metrics.jsonl").open()]
    assert len(steps) == 3
    assert all(math.isfinite(step["loss"]) and not step.get("is_skipped") for step in steps)
    assert all(0 < step["sampler_topk_mass"] <= 1 for step in steps)


def test_steps_that_overflow_in_float16_are_reported_and_their_versions_published(plumbing, system):
    settings = ("trainer.dtype=float16", "trainer.loss_scale.initial=1e12")
    # The entropy term always has a gradient, unlike advantages of equal rewards.
    further_settings = ("algorithm.entropy_coefficient=1.0", "algorithm.max_nonfinite_steps=0")
    result = system.train(plumbing, *settings, *further_settings)
    assert result.code == 0, result.out + result.err
    steps = [json.loads(line) for line in (result.folder / "metrics.jsonl").open()]
    assert [step["loss_scale"] for step in steps] == [5e11, 2.5e11, 1.25e11]
    assert all(step["is_skipped"] and step["overflow_updates"] for step in steps)
    assert result.summary["weight_version"] == 3
    assert (result.out + result.err).count("overflowed in float16") == 3
