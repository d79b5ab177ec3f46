"""Tests of the division of a model into stages, and of what is refused."""

import pytest
import torch

from services.common.memory.sizes import shapes_of
from services.common.memory.trainer import trainer_memory
from services.common.models.loading import build_model, stored_tensors
from services.common.models.stages import (
    bubble,
    head_in_layers,
    most_packs,
    stage_layers,
    stages_of,
)
from services.common.runspec.loader import SpecError, parse_spec
from services.extras.stages.layout import Stage, describe, keep_stage
from services.extras.stages.problems import FAMILIES, problems
from tests.helpers.mixtures import tiny_config
from tests.helpers.specs import changed, spec_with

PP2 = {"engine": "stages", "world_size": 2, "pipeline_parallel": 2}


def config_of(model_type="qwen2", *, layers=7, tied=True):
    return tiny_config(model_type, num_hidden_layers=layers, tie_word_embeddings=tied)


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [
        (8, 1, [8]),
        (8, 4, [2, 2, 2, 2]),
        (9, 4, [2, 3, 2, 2]),
        (10, 4, [2, 3, 3, 2]),
        (3, 2, [2, 1]),
    ],
)
def test_layers_are_divided_evenly_and_the_rest_is_in_the_middle(layers, stages, counts):
    division = stage_layers(layers, stages)
    assert [len(stage) for stage in division] == counts
    assert [layer for stage in division for layer in stage] == list(range(layers))


@pytest.mark.parametrize(
    ("layers", "stages", "head", "counts"),
    [
        (28, 2, 5.0, [17, 11]),
        (36, 2, 3.2, [20, 16]),
        (28, 4, 5.0, [8, 9, 8, 3]),
        (4, 2, 9.0, [3, 1]),
        (28, 2, 0.4, [14, 14]),
    ],
)
def test_the_stage_of_a_large_head_has_fewer_layers(layers, stages, head, counts):
    division = stage_layers(layers, stages, head=head)
    assert [len(stage) for stage in division] == counts


def test_the_head_of_a_mixture_counts_in_addition_to_the_experts_that_a_token_passes():
    config = {"num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 100}
    shapes = {
        "model.embed_tokens.weight": (100, 8),
        "model.layers.0.mlp.experts.down_proj": (4, 25, 8),
        "model.layers.1.mlp.down_proj.weight": (25, 8),
    }
    assert head_in_layers(config | {"num_experts": 0}, shapes) == pytest.approx(1.6)
    mixture = {**config, "num_experts": 4, "num_experts_per_tok": 2}
    assert head_in_layers(mixture, shapes) == pytest.approx(2 * 800 / 600)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match=r"trainer.pipeline_parallel is 3.*set it to at most 2"):
        stage_layers(2, 3)


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_stages_hold_every_tensor_and_only_a_tied_embedding_twice(model_type, tied):
    config = config_of(model_type, tied=tied)
    whole, stage_names = shapes_of(config), []
    division = stage_layers(7, 3, head=head_in_layers(config.to_dict(), whole))
    for index in range(3):
        model = build_model(config, dtype=torch.float32, device="meta")
        stage = Stage(index, 3, range(index, index + 1), group=None)
        layers = describe(model).layers(3)[index]
        keep_stage(model, stage, layers, uses_head=True)
        names = set(stored_tensors(model))
        assert names == {name for name in whole if index in stages_of(name, division, is_tied=tied)}
        stage_names += names
    twice = {name for name in stage_names if stage_names.count(name) > 1}
    assert set(stage_names) == set(whole)
    assert twice == ({"model.embed_tokens.weight"} if tied else set())


def test_a_critic_keeps_no_second_embedding():
    model = build_model(config_of(), dtype=torch.float32, device="meta")
    keep_stage(model, Stage(1, 2, range(1, 2), group=None), range(4, 7), uses_head=False)
    assert "model.embed_tokens.weight" not in dict(model.named_parameters())


@pytest.mark.parametrize(
    ("trainer", "others", "key"),
    [
        ({"world_size": 2, "pipeline_parallel": 2}, {}, "trainer.pipeline_parallel"),
        ({**PP2, "lora": {}}, {}, "trainer.lora"),
        (
            PP2,
            {"algorithm": {"loss": "reinforce", "score_centering": 8}},
            "algorithm.score_centering",
        ),
        ({**PP2, "cpu_offload": True}, {}, "trainer.cpu_offload"),
        ({**PP2, "optimizer": {"kind": "muon"}}, {}, "trainer.optimizer.kind"),
        (PP2, {"topology": {"placement": "colocated"}}, "topology.placement"),
        (PP2, {"weight_sync": {"senders": "leader"}}, "weight_sync.senders"),
    ],
)
def test_settings_that_stages_do_not_support_are_refused_with_key_and_fix(trainer, others, key):
    with pytest.raises(SpecError) as refused:
        parse_spec(changed(trainer=trainer, **others))
    assert any(key in problem and "set" in problem for problem in refused.value.problems)


@pytest.mark.parametrize(
    ("config", "stages", "words"),
    [
        ({"model_type": "gemma2", "num_hidden_layers": 4}, 2, ["gemma2", "trainer.engine"]),
        (
            {"model_type": "qwen3", "num_hidden_layers": 2},
            3,
            ["pipeline_parallel is 3", "at most 2"],
        ),
    ],
)
def test_models_that_cannot_be_divided_are_refused(config, stages, words):
    trainer = {"engine": "stages", "world_size": stages, "pipeline_parallel": stages}
    (problem,) = problems(spec_with(trainer=trainer), config)
    assert all(word in problem for word in words)
    assert not list(
        problems(spec_with(trainer=PP2), {"model_type": "qwen3", "num_hidden_layers": 2})
    )


def memory_of(**trainer):
    config = config_of("qwen3", layers=28, tied=False)
    config.vocab_size, config.hidden_size, config.intermediate_size = 151_936, 1536, 8960
    spec = spec_with(
        trainer={
            "dtype": "bfloat16",
            "activation_checkpointing": False,
            "tokens_per_micro_batch": 8192,
            **trainer,
        }
    )
    return trainer_memory(spec, config, gpu_bytes=141 * 10**9)


def test_memory_is_that_of_the_stage_that_needs_the_most():
    whole = memory_of()
    two = memory_of(**PP2)
    # The first of two stages has 17 of 28 layers, for two micro-batches, and no logits. Embedding and head
    # have the size of five layers each.
    expected_bytes = whole.parts["activations"] * 2 * 17 / 28
    assert two.parts["activations"] == pytest.approx(expected_bytes, rel=0.01)
    assert "logits" not in two.parts
    state = ("weights, float32", "optimizer", "gradients")
    share = (5 + 17) / (5 + 28 + 5)
    for name in state:
        assert two.parts[name] == pytest.approx(whole.parts[name] * share, rel=0.01)
    shared = memory_of(**PP2 | {"world_size": 4})
    assert shared.parts["optimizer"] == two.parts["optimizer"] / 2
    assert shared.parts["gradients"] == two.parts["gradients"]
    # States and gradients of two micro-batches, in bfloat16.
    assert two.parts["states between stages"] == 2 * 2 * 2 * 1536 * 8192


def test_experts_are_counted_on_the_ranks_that_hold_them():
    config = tiny_config("qwen3_moe", num_experts=64, num_hidden_layers=4)
    trainer = {"engine": "stages", "pipeline_parallel": 2, "dtype": "bfloat16", "world_size": 16}
    memories = [
        trainer_memory(
            spec_with(trainer={**trainer, "expert_parallel": experts}), config, gpu_bytes=10**11
        ).parts["gradients"]
        for experts in (1, 8)
    ]
    expert_bytes = 4 * 2 * 64 * 3 * 24 * 32  # of the two layers of a stage
    assert memories[0] - memories[1] == pytest.approx(expert_bytes * 7 / 8)


@pytest.mark.parametrize(("stages", "packs", "share"), [(1, 8, 0), (2, 4, 1 / 5), (4, 16, 3 / 19)])
def test_a_stage_waits_for_one_micro_batch_of_each_other_stage(stages, packs, share):
    assert bubble(stages, packs) == pytest.approx(share)


def test_micro_batches_of_a_pipeline_are_at_most_its_samples():
    trainer = PP2 | {"prompts_per_step": 8, "world_size": 4, "tokens_per_micro_batch": 100}
    rollout = {"group_size": 4, "max_response_tokens": 40, "rewards": [{"name": "exact_match"}]}
    spec = spec_with(trainer=trainer, rollout=rollout, data={"max_prompt_tokens": 10})
    assert most_packs(spec) == 8  # 16 samples of 50 tokens on each of two pipelines
    longer = spec_with(trainer=trainer, rollout=rollout | {"max_response_tokens": 4000})
    assert most_packs(longer) == 16


def test_replayed_routing_is_refused_with_recomputed_layers():
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 4}
    rollout = {"routing_replay": "replay", "rewards": [{"name": "exact_match"}]}
    (problem,) = problems(spec_with(trainer=PP2, rollout=rollout), config)
    assert "rollout.routing_replay" in problem
    trainer = PP2 | {"activation_checkpointing": False}
    assert not list(problems(spec_with(trainer=trainer, rollout=rollout), config))
