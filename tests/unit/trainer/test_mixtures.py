"""Mixtures of experts: export to standard checkpoints, and adapters merged into expert weights."""

from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from services.common.models.experts import checkpoint_names
from services.common.models.families import FAMILIES
from services.common.models.loading import build_model, stored_tensors
from services.common.runspec.algorithm import AlgorithmSpec
from services.common.runspec.trainer import LoraSpec
from services.extras.export.checkpoint import export_checkpoint
from services.trainer.batch.packing import pack
from services.trainer.engines.fsdp.lora import (
    add_adapters,
    begin_adapters,
    is_adapter,
    merged_parameters,
)
from services.trainer.model.flops import active_weights
from services.trainer.model.policy import Policy
from services.trainer.model.routing import Routing
from services.wire.data.jagged import Jagged
from services.wire.step_command import StepCommand
from tests.helpers.batches import CPU, policy_of, random_queue, rank_of, spec_of
from tests.helpers.mixtures import tiny_config

_MIXTURES = [name for name, family in FAMILIES.items() if family.routing is not None]


@pytest.mark.parametrize("family", _MIXTURES)
def test_experts_have_the_names_of_checkpoints(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    model = build_model(config, dtype=torch.float32, device=CPU, seed=1)
    for name, value in stored_tensors(model).items():
        if name.endswith("e_score_correction_bias"):
            value.uniform_(-0.2, 0.2)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as stored:
        named = {
            stem: tensor
            for name, value in stored_tensors(model).items()
            for stem, tensor in checkpoint_names(name, value, config.to_dict())
        }
        assert named.keys() == set(stored.keys())
        for name, tensor in named.items():
            assert torch.equal(tensor, stored.get_tensor(name)), name
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(3, 20)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_a_trained_mixture_is_exported_and_loads_elsewhere(tmp_path: Path) -> None:
    spec = spec_of(model={"path": "tiny:qwen3_moe-0.7m"})
    policy = policy_of(spec)
    rank = rank_of(spec, policy, random_queue(policy_of(spec)), root=tmp_path / "checkpoints")
    before = policy.model.model.layers[0].mlp.experts.down_proj.detach().clone()
    rank.train(StepCommand(1, random_queue(policy_of(spec)).meta))
    assert not torch.equal(policy.model.model.layers[0].mlp.experts.down_proj, before)
    folder = rank.checkpointer.write(rank.snapshot(1))
    export_checkpoint(folder, spec, tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.arange(2, 20)[None]
    policy.model.set_attn_implementation("sdpa")
    torch.testing.assert_close(loaded(ids).logits, policy.model(ids).logits)


def test_adapters_of_the_attention_are_merged_and_experts_stay() -> None:
    config = tiny_config("qwen3_moe")
    plain = dict(build_model(config, dtype=torch.float32, device=CPU, seed=1).named_parameters())
    model = build_model(config, dtype=torch.float32, device=CPU, seed=1)
    add_adapters(model, LoraSpec(rank=2))
    begin_adapters(model, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    merged = dict(merged_parameters(model))
    assert merged.keys() == plain.keys()
    moved = {name for name, value in merged.items() if not torch.equal(value, plain[name])}
    assert moved == {name for name in plain if "self_attn" in name and "_proj" in name}


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "qwen3_next"])
def test_modules_with_the_names_of_an_experts_parts_get_their_own_adapters(family: str) -> None:
    model = build_model(tiny_config(family), dtype=torch.float32, device="meta")
    targets = ("gate_proj", "up_proj", "down_proj")
    add_adapters(model, LoraSpec(rank=2, target_modules=targets))
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    assert any(".shared_expert" in name for name in trained)
    assert not any(".experts." in name for name in trained)


@pytest.mark.parametrize("family", _MIXTURES)
def test_adapters_of_experts_are_what_their_merged_weights_are(family: str) -> None:
    config = tiny_config(family)
    build = partial(build_model, config, dtype=torch.float32, device=CPU, seed=1)
    plain, policy, merged = (Policy(build(), temperature=1.0) for _ in range(3))
    targets = ("o_proj", "experts.gate_up_proj", "experts.down_proj")
    add_adapters(policy.model, LoraSpec(rank=2, target_modules=targets))
    begin_adapters(policy, seed=0)
    texts = Jagged.from_list([torch.arange(3, 20), torch.arange(30, 41)])
    pack_ = pack(Jagged.from_list([torch.tensor([1, 2])] * 2), texts, device=CPU)
    torch.testing.assert_close(policy(pack_), plain(pack_))
    names = dict(plain.model.named_parameters()).keys()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if is_adapter(name):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    weights = dict(merged_parameters(policy.model))
    assert names <= weights.keys()
    merged.model.load_state_dict(weights, strict=False)
    logprobs, entropies = policy(pack_)
    torch.testing.assert_close((logprobs, entropies), merged(pack_), rtol=1e-5, atol=1e-5)
    assert (logprobs - plain(pack_)[0]).abs().max() > 1e-2
    logprobs.sum().backward()
    for name, parameter in policy.named_parameters():
        assert (parameter.grad is not None and parameter.grad.any()) == is_adapter(name), name


def test_of_the_experts_those_count_that_a_token_passes() -> None:
    config = tiny_config("mixtral")
    model = build_model(config, dtype=torch.float32, device="meta")
    attention = 2 * 32 * 8 * (4 + 2)
    others = 2 * 32 + 8 * 32
    assert active_weights(model, config) == 2 * (attention + others + 3 * 3 * 32 * 48)


@pytest.mark.parametrize(
    "aggregation", get_args(AlgorithmSpec.model_fields["aggregation"].annotation)
)
@pytest.mark.parametrize("early", [(), (4,), (1, 3, 8)])
def test_the_balance_loss_weighs_the_same_however_a_step_is_divided(
    monkeypatch: pytest.MonkeyPatch, aggregation: str, early: tuple[int, ...]
) -> None:
    losses = []
    for balancing in ({"kind": "loss", "coefficient": 3.0}, {"kind": "none"}):
        spec = spec_of(
            model={"path": "tiny:qwen3_moe-0.7m"},
            algorithm={"max_staleness": 0, "aggregation": aggregation},
            trainer={
                "accumulate_early": bool(early),
                "balancing": balancing,
                "tokens_per_micro_batch": 48,
            },
        )
        monkeypatch.setattr(Routing, "balance_loss", lambda routing: torch.ones(()))
        policy = policy_of(spec)
        queue = random_queue(policy_of(spec, seed=1), num_groups=4)
        rank = rank_of(spec, policy, queue)
        # The shortest groups first: their counts are no estimate of those of the others.
        lengths = torch.tensor(queue.fields["response_ids"].lengths.tolist()).view(4, 4).sum(1)
        rows = [4 * group + i for group in lengths.argsort().tolist() for i in range(4)]
        for count in early:
            rank.accumulate(queue.meta.select(rows[:count]), weight_version=0)
        losses.append(rank.train(StepCommand(1, queue.meta)).metrics["loss"])
    assert losses[0] - losses[1] == pytest.approx(3.0, rel=1e-5)
