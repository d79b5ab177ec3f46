"""Tests that LoRA on a quantized base equals LoRA on its rounded weights in trainer, rollout and export."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn
from transformers import AutoModelForCausalLM

from services.common.memory.trainer import trainer_memory
from services.common.models.loading import load_config, stored_tensors
from services.common.models.quantization import is_quantized, rounded
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import RunSpec
from services.extras.export.checkpoint import export_checkpoint
from services.rollout.frozen_weights import FrozenWeights
from services.trainer.batch.packing import pack
from services.trainer.engines.fsdp.build import fitted_to_gpu
from services.trainer.engines.fsdp.lora import add_adapters, begin_adapters
from services.trainer.engines.fsdp.weights import WeightExport
from services.trainer.model.flops import active_weights
from services.trainer.model.policy import Policy, trainable
from services.trainer.model.quantized import QuantizedLinear, quantize_base
from services.trainer.ranks.build import build_rank
from services.trainer.settings import TrainerSettings
from services.weightsync.adapters import FROZEN_DIGEST
from services.wire.data.jagged import Jagged
from services.wire.step_command import StepCommand
from tests.helpers.batches import CPU, policy_of, random_queue, rank_of, spec_of

TINY = spec_of()
KINDS = ["int8", "nf4"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_layer_has_the_output_and_gradient_of_its_rounded_weight(kind) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(24, 10)
    quantized = QuantizedLinear(layer, kind, dtype=torch.float32)
    with torch.no_grad():
        layer.weight.copy_(rounded(layer.weight, kind))
    assert torch.equal(quantized.weight, layer.weight)
    inputs = [torch.randn(3, 5, 24, generator=generator).requires_grad_() for _ in range(2)]
    with torch.no_grad():
        inputs[1].copy_(inputs[0])
    weights = torch.randn(3, 5, 10, generator=generator)
    outputs = [
        layer_of_pair(values)
        for layer_of_pair, values in zip((layer, quantized), inputs, strict=True)
    ]
    assert torch.equal(*outputs)
    for output in outputs:
        (output * weights).sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-6, atol=1e-6)


def test_the_operation_fulfils_the_rules_of_torch() -> None:
    layer = QuantizedLinear(nn.Linear(24, 10), "nf4", dtype=torch.float32)
    inputs = torch.randn(5, 24, requires_grad=True)
    arguments = (inputs, layer.values, layer.scales, layer.bias.detach(), 10)
    torch.library.opcheck(torch.ops.slipstream.quantized_linear.default, arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_as_on_a_base_of_the_rounded_weights(kind, tmp_path: Path) -> None:
    spec = _spec(tmp_path, kind)
    queue = random_queue(policy_of(TINY))
    trained = {}
    for is_packed in (True, False):
        policy = _policy(spec, is_packed=is_packed)
        rank = rank_of(spec, policy, queue, root=tmp_path / str(is_packed))
        rank.train(StepCommand(1, queue.meta))
        rank.train(StepCommand(2, queue.meta))
        trained[is_packed] = dict(WeightExport(policy, dtype=torch.float32).weight_tensors())
    assert trained[True].keys() == trained[False].keys()
    for name, value in trained[True].items():
        torch.testing.assert_close(value, trained[False][name], rtol=1e-5, atol=1e-6, msg=name)


def test_adapters_on_a_quantized_base_learn_an_answer(tmp_path: Path) -> None:
    policy = _policy(_spec(tmp_path, "nf4"))
    prompts, answers = torch.tensor([2, 3, 4]), torch.tensor([5, 6, 7, 8])
    packed = pack(Jagged.from_list([prompts]), Jagged.from_list([answers]), device=CPU)
    optimizer = torch.optim.Adam(trainable(policy), lr=0.005)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = -policy(packed)[0].mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("kind", KINDS)
def test_rollouts_and_the_export_have_the_base_of_the_trainer(kind, tmp_path: Path) -> None:
    spec = _spec(tmp_path, kind)
    policy = _policy(spec)
    queue = random_queue(policy_of(TINY))
    rank = rank_of(spec, policy, queue, root=tmp_path / "checkpoints")
    rank.train(StepCommand(1, queue.meta))
    merged = dict(WeightExport(policy, dtype=torch.float32).weight_tensors())
    tensors = dict(WeightExport(policy, dtype=torch.float32, sends_adapters=True).weight_tensors())
    config = load_config(spec.model, load_tokenizer(spec.model))
    frozen = FrozenWeights(
        spec.model,
        config,
        dtype=torch.float32,
        device=CPU,
        base_dtype=kind,
    )
    frozen.check(tensors)
    arrived = frozen.merged(tensors)
    assert arrived.keys() == merged.keys()
    assert all(torch.equal(arrived[name], value) for name, value in merged.items())

    saved = rank.checkpointer.write(rank.snapshot(1))
    export_checkpoint(saved, spec, tmp_path / "hf")
    exported = stored_tensors(AutoModelForCausalLM.from_pretrained(tmp_path / "hf"))
    assert all(torch.equal(exported[name], value) for name, value in merged.items())

    unrounded = FrozenWeights(spec.model, config, dtype=torch.float32, device=CPU)
    assert not torch.equal(unrounded._digest, tensors[FROZEN_DIGEST])


def test_a_rank_holds_the_base_quantized_and_the_plan_counts_it(tmp_path: Path) -> None:
    spec = _spec(tmp_path, "nf4", dtype="bfloat16")
    settings = TrainerSettings(
        controller_address="127.0.0.1:1",
        run_id="r",
        worker_id="trainer-0",
        state_directory=tmp_path,
    )
    nothing: Any = SimpleNamespace(fetch=None, store_records=None)
    built = build_rank(spec, settings, transfers=nothing, progress=lambda *_: None)
    try:
        engine: Any = built.rank.runner.engine
        module = engine.module
        frozen = [p for p in module.parameters() if not p.requires_grad]
        packed = [
            tensor
            for layer in module.modules()
            if isinstance(layer, QuantizedLinear)
            for tensor in (layer.values, layer.scales)
        ]
        assert packed
        config = load_config(spec.model, load_tokenizer(spec.model))
        parts = trainer_memory(fitted_to_gpu(spec, settings, device=CPU), config, gpu_bytes=10**12)
        assert parts.parts["weights, frozen"] == sum(tensor.nbytes for tensor in (*frozen, *packed))
        policy = _policy(spec, is_packed=False)
        whole = {
            name: value for name, value in policy.model.named_parameters() if "lora" not in name
        }
        arrived = dict(WeightExport(module, dtype=torch.bfloat16).weight_tensors())
        for name, value in whole.items():
            plain = name.replace(".base_layer.", ".")
            assert torch.equal(arrived[plain], value.bfloat16()), name
        adapters = sum(p.numel() for n, p in policy.model.named_parameters() if "lora" in n)
        layers = sum(value.numel() for name, value in whole.items() if ".layers." in name)
        assert active_weights(module, config) == layers + adapters
    finally:
        distributed.destroy_process_group()


def _spec(tmp_path: Path, kind: str, **trainer: Any) -> RunSpec:
    folder = tmp_path / "model"
    policy_of(TINY).model.save_pretrained(folder)
    load_tokenizer(TINY.model).save(folder)
    return spec_of(
        model={"path": str(folder), "tokenizer": None},
        trainer={
            "lora": {"rank": 4, "alpha": 5.0, "base_dtype": kind},
            "optimizer": {"learning_rate": 0.01},
            **trainer,
        },
    )


def _policy(spec: RunSpec, *, is_packed: bool = True) -> Policy:
    """Returns a policy with adapters on a quantized base, or on rounded weights if not ``is_packed``."""
    lora = spec.trainer.lora
    assert lora is not None
    assert lora.base_dtype is not None
    dtype = getattr(torch, spec.trainer.dtype)
    model = AutoModelForCausalLM.from_pretrained(spec.model.path, dtype=torch.float32)
    policy = Policy(model, temperature=1.0)
    if not is_packed:
        for name, value in model.named_parameters():
            if is_quantized(name, tuple(value.shape)):
                value.data = rounded(value.data.to(dtype), lora.base_dtype).float()
    add_adapters(model, lora)
    if is_packed:
        quantize_base(model, lora.base_dtype, dtype=dtype)
    begin_adapters(policy, seed=0)
    return policy
