"""``topology.placement: colocated``: what it gives, and what it refuses with the figure."""

import pytest

from services.common.spec.loader import SpecError, parse_spec


def colocated(**parts):
    document = {
        "name": "turns",
        "model": {"path": "tiny:qwen2-0.4m"},
        "data": {"train": {"source": "jsonl", "path": "prompts.jsonl"}},
        "rollout": {"rewards": [{"name": "exact_match"}]},
        "trainer": {"steps": 1, "prompts_per_step": 2},
        "topology": {"placement": "colocated"},
    }
    for part, values in parts.items():
        document[part] = {**document.get(part, {}), **values}
    return document


@pytest.mark.parametrize(("ranks", "engine_gpus", "replicas"), [(1, 1, 1), (4, 1, 4), (4, 2, 2)])
def test_the_rollouts_fill_the_gpus_of_the_trainer(ranks, engine_gpus, replicas):
    engine = {"engine": "vllm", "engine_arguments": {"tensor_parallel_size": engine_gpus}}
    spec = parse_spec(colocated(trainer={"world_size": ranks}, rollout=engine))
    assert spec.rollout.replicas == replicas
    assert spec.topology.is_colocated


def test_every_gpu_may_have_several_rollouts():
    assert parse_spec(colocated(rollout={"replicas": 2})).rollout.replicas == 2


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (
            colocated(rollout={"replicas": 3}, trainer={"world_size": 2}),
            ["rollout.replicas (3)", "trainer.world_size (2)", "set rollout.replicas to 2"],
        ),
        (
            colocated(rollout={"engine": "vllm", "engine_arguments": {"tensor_parallel_size": 2}}),
            ["rollout.replicas (1) of 2 GPU(s)", "trainer.world_size (1)", "a multiple of 2"],
        ),
        (colocated(rollout={"engine": "sglang"}), ["'sglang'", "one of torch, vllm, fake"]),
        (colocated(algorithm={"max_staleness": 2}), ["algorithm.max_staleness 2", "0 or 1"]),
        (colocated(rollout={"kv_policy": "keep"}), ["rollout.kv_policy", "'recompute'"]),
        (
            colocated(weight_sync={"mode": "inplace"}),
            ["weight_sync.mode 'inplace'", "leave it out"],
        ),
        (
            colocated(validation={"replicas": 1}, rollout={"replicas": 2}),
            ["validation.replicas is 1", "set it to 0"],
        ),
        (
            colocated(trainer={"accumulate_early": True}, algorithm={"max_staleness": 0}),
            ["trainer.accumulate_early", "set it to False"],
        ),
        (
            colocated(topology={"task_groups": ["train", "generate"], "gpus": 2}),
            ["topology.task_groups", "leave them out"],
        ),
        (colocated(algorithm={"loss": "sft"}), ["algorithm.loss 'sft'", "take another loss"]),
    ],
)
def test_what_cannot_take_turns_is_refused(document, words):
    with pytest.raises(SpecError) as refused:
        parse_spec(document)
    message = str(refused.value)
    assert "or set topology.placement to 'disaggregated'" in message
    for word in words:
        assert word in message
