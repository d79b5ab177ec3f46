"""Tests that a rank that is alone trains alike whether or not it keeps gathered weights."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from services.common.models.loading import build_model
from services.common.runspec.trainer import TrainerSpec
from services.trainer.batch.packing import pack
from services.trainer.collectives import local_part, spread_like
from services.trainer.engines.fsdp.casting import casts_weights
from services.trainer.engines.fsdp.optim import build_optimizer
from services.trainer.engines.fsdp.parallel import begin_micro_batch, build_topology, distribute
from services.trainer.model.policy import Policy
from services.wire.data.jagged import Jagged
from tests.helpers.batches import CPU
from tests.helpers.mixtures import tiny_config

_PACKS = 3


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _trained(family: str, *, keeps: bool) -> tuple[list[Tensor], int]:
    """Returns scores, gradients and weights of two updates, and the most bytes of gathered layers."""
    config = tiny_config(family, num_hidden_layers=3)
    policy = Policy(build_model(config, dtype=torch.float32, device=CPU, seed=0), temperature=1.0)
    keys = {"steps": 1, "prompts_per_step": 1, "dtype": "bfloat16", "keep_gathered": keeps}
    spec = TrainerSpec.model_validate(
        {**keys, "optimizer": {"learning_rate": 0.01}, "activation_checkpointing": True}
    )
    distribute(policy, spec, build_topology(spec, device=CPU, rank=0, world_size=1))
    optimizer = build_optimizer(policy, spec.optimizer)
    generator = torch.Generator().manual_seed(1)
    results, gathered = [], 0
    for _ in range(2):
        for number in range(_PACKS):
            tokens = [torch.randint(3, 61, (length,), generator=generator) for length in (9, 4)]
            packed = pack(Jagged.from_list(tokens), Jagged.from_list(tokens), device=CPU)
            begin_micro_batch(policy, is_last=number == _PACKS - 1, spec=spec)
            scores, _ = policy(packed)
            gathered = max(gathered, _gathered_bytes(policy))
            scores.sum().backward()
            results.append(scores.detach())
        weights = [*policy.parameters()]
        assert all(weight.grad is not None for weight in weights)
        results += [local_part(weight.grad).clone() for weight in weights]
        optimizer.step()
        optimizer.zero_grad()
        results += [local_part(weight).detach().clone() for weight in weights]
    return results, gathered


def _gathered_bytes(policy: Policy) -> int:
    """Returns the bytes of layers that FSDP holds gathered."""
    return sum(
        output.untyped_storage().nbytes()
        for layer in policy.model.get_decoder().layers
        if hasattr(layer, "_get_fsdp_state")
        for parameter in layer._get_fsdp_state()._fsdp_param_group.fsdp_params
        for output in parameter.all_gather_outputs
    )


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_scores_gradients_and_weights_are_bit_identical(family: str) -> None:
    with_gathered, kept_bytes = _trained(family, keeps=True)
    distributed.destroy_process_group()
    freed, freed_bytes = _trained(family, keeps=False)
    assert len(with_gathered) == len(freed)
    assert all(map(torch.equal, with_gathered, freed))
    assert kept_bytes > 0 == freed_bytes


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_a_rank_that_is_alone_casts_the_bits_that_fsdp_gathers(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cast, _ = _trained(family, keeps=False)
    distributed.destroy_process_group()
    monkeypatch.setattr(TrainerSpec, "casts_by_layer", False)
    gathered, _ = _trained(family, keeps=False)
    assert len(cast) == len(gathered)
    assert all(map(torch.equal, cast, gathered))


def test_a_layer_without_gradient_or_after_an_error_has_its_parameters_back() -> None:
    layer = nn.Linear(3, 3, bias=False)
    weight = layer.weight

    def failing(values: Tensor) -> Tensor:
        assert layer.weight.dtype == values.dtype == torch.bfloat16
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        casts_weights(layer, failing, torch.bfloat16)(torch.ones(2, 3))
    assert layer.weight is weight
    layer.requires_grad_(False)
    layer.forward = casts_weights(layer, layer.forward, torch.bfloat16)
    inputs = torch.ones(2, 3, requires_grad=True)
    layer(inputs).sum().backward()
    assert layer.weight is weight
    assert weight.grad is None
    expected = weight.detach().bfloat16().sum(0).expand(2, 3)
    assert inputs.grad is not None
    assert torch.allclose(inputs.grad, expected.float(), atol=0.05)


def test_host_memory_of_a_sharded_parameter_stays_in_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = TrainerSpec(steps=1, prompts_per_step=1, dtype="bfloat16")
    policy = Policy(
        build_model(tiny_config("qwen2"), dtype=torch.float32, device=CPU), temperature=1.0
    )
    distribute(policy, spec, build_topology(spec, device=CPU, rank=0, world_size=1))
    parameter = next(policy.parameters())
    moment = torch.zeros(local_part(parameter).shape)
    monkeypatch.setattr(DeviceMesh, "device_type", "meta")  # stands for GPUs of the mesh
    assert local_part(spread_like(moment, parameter)).device == CPU
