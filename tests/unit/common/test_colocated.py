"""Tests of ``topology.placement``: derived settings of colocated runs, and refusals with figures."""

import pytest

from services.common.runspec.loader import SpecError, parse_spec
from tests.helpers.specs import changed

MIXED = {"placement": "mixed"}


def colocated(**parts):
    topology = {"placement": "colocated", **parts.pop("topology", {})}
    return changed(topology=topology, **parts)


@pytest.mark.parametrize(("ranks", "engine_gpus", "replicas"), [(1, 1, 1), (4, 1, 4), (4, 2, 2)])
def test_the_rollouts_fill_the_gpus_of_the_trainer(ranks, engine_gpus, replicas):
    engine = {"engine": "vllm", "engine_arguments": {"tensor_parallel_size": engine_gpus}}
    spec = parse_spec(colocated(trainer={"world_size": ranks}, rollout=engine))
    assert spec.rollout.replicas == replicas
    assert spec.colocated_rollouts == replicas


@pytest.mark.parametrize(("rollout", "replicas"), [({}, 5), ({"replicas": 7}, 7)])
def test_of_a_mixed_run_as_many_rollouts_take_turns_as_the_trainers_gpus_hold(rollout, replicas):
    parts = {"trainer": {"world_size": 4}, "rollout": rollout, "algorithm": {"max_staleness": 4}}
    spec = parse_spec(colocated(**parts, topology={"placement": "mixed"}))
    assert (spec.rollout.replicas, spec.colocated_rollouts) == (replicas, 4)
    assert [spec.is_colocated(name) for name in ("trainer-0", "rollout-3", "rollout-4")] == [
        False,
        True,
        False,
    ]


def test_every_gpu_may_have_several_rollouts():
    assert parse_spec(colocated(rollout={"replicas": 2})).rollout.replicas == 2


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (
            colocated(rollout={"replicas": 3}, trainer={"world_size": 2}),
            ["rollout.replicas (3)", "trainer.world_size (2)"],
        ),
        (
            colocated(rollout={"engine": "vllm", "engine_arguments": {"tensor_parallel_size": 2}}),
            ["rollout.replicas (1)", "trainer.world_size (1)"],
        ),
        (colocated(rollout={"engine": "none"}), ["'none'", "torch, vllm, sglang, fake"]),
        (colocated(algorithm={"max_staleness": 2}), ["algorithm.max_staleness 2"]),
        (colocated(rollout={"kv_policy": "keep"}), ["rollout.kv_policy", "'recompute'"]),
        (
            colocated(weight_sync={"mode": "inplace"}),
            ["weight_sync.mode 'inplace'"],
        ),
        (
            colocated(validation={"replicas": 1}, rollout={"replicas": 2}),
            ["validation.replicas is 1"],
        ),
        (
            colocated(rollout={"replicas": 2}, trainer={"world_size": 2}, topology=MIXED),
            ["rollout.replicas (2)"],
        ),
        (
            colocated(
                rollout={"engine": "vllm", "engine_arguments": {"tensor_parallel_size": 2}},
                trainer={"world_size": 3},
                topology=MIXED,
            ),
            ["trainer.world_size (3)"],
        ),
        (
            colocated(validation={"replicas": 2}, rollout={"replicas": 2}, topology=MIXED),
            ["validation.replicas is 2"],
        ),
        (
            colocated(trainer={"accumulate_early": True}, algorithm={"max_staleness": 0}),
            ["trainer.accumulate_early"],
        ),
        (
            colocated(topology={"task_groups": ["train", "generate"], "gpus": 2}),
            ["topology.task_groups"],
        ),
        (colocated(algorithm={"loss": "sft"}), ["algorithm.loss 'sft'"]),
    ],
)
def test_invalid_colocated_and_mixed_runs_are_rejected(document, words):
    with pytest.raises(SpecError) as refused:
        parse_spec(document)
    message = str(refused.value)
    assert "topology.placement" in message
    for word in words:
        assert word in message


def test_too_few_rollouts_of_a_mixed_run_are_one_problem():
    document = colocated(rollout={"replicas": 2}, trainer={"world_size": 4}, topology=MIXED)
    with pytest.raises(SpecError) as refused:
        parse_spec(document)
    (problem,) = refused.value.problems
    assert "set rollout.replicas to 5 or more" in problem
