"""Adapters alone are trained, and leave the trainer merged under the plain names."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.common.spec.trainer import LoraSpec
from services.trainer.checkpoint.export import export_checkpoint
from services.trainer.model.lora import add_adapters
from services.trainer.weights import WeightExport
from tests.unit.trainer.batches import policy_of, random_queue, rank_of, spec_of

SPEC = spec_of(trainer={"lora": {"rank": 4}, "optimizer": {"learning_rate": 0.01}})


def test_merged_weights_are_the_trained_policy(tmp_path: Path) -> None:
    assert SPEC.trainer.lora is not None
    policy = policy_of(SPEC)
    queue = random_queue(policy)
    plain = [
        (spec.name, spec.shape) for spec in WeightExport(policy, dtype=torch.float32).weight_specs()
    ]
    frozen = policy.model.get_input_embeddings().weight.clone()
    add_adapters(policy.model, SPEC.trainer.lora)
    rank = rank_of(SPEC, policy, queue, root=tmp_path / "checkpoints")
    rank.train(1, queue.meta)
    rank.train(2, queue.meta)
    assert torch.equal(policy.model.get_input_embeddings().weight, frozen)
    export = WeightExport(policy, dtype=torch.float32)
    assert [(spec.name, spec.shape) for spec in export.weight_specs()] == plain
    merged = policy_of(SPEC)
    merged.model.load_state_dict(dict(export.weight_tensors()), strict=False)
    ids = torch.tensor([[2, 3, 4, 5]])
    for model in (policy.model, merged.model):
        model.set_attn_implementation("sdpa")
    expected = policy.model(ids).logits
    torch.testing.assert_close(merged.model(ids).logits, expected, rtol=1e-4, atol=1e-4)

    folder = rank.checkpointer.write(rank.snapshot(2))
    export_checkpoint(folder, SPEC, tmp_path / "hf")
    elsewhere = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    torch.testing.assert_close(elsewhere(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").eos_token_id == 1


def test_unknown_target_modules_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"trainer\.lora\.target_modules \['nothing'\]"):
        add_adapters(policy_of(SPEC).model, LoraSpec(target_modules=("nothing",)))
