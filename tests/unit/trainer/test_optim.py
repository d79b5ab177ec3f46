"""Optimizers: weight decay, Muon, moments in 8 bits; two ranks update like one."""

from collections import OrderedDict
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from services.common.models.quantization import block_of_moments, moment_bytes
from services.common.runspec.trainer import OptimizerSpec
from services.trainer.engines.fsdp import adamw as adamw_module
from services.trainer.engines.fsdp.adamw import levels_of_moments
from services.trainer.engines.fsdp.checkpoint import ModelCheckpoint
from services.trainer.engines.fsdp.optim import build_optimizer
from tests.helpers.ranks import run_ranks


class Layer(nn.Module):
    """One parameter of each kind that models have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(4, 3)
        self.q_proj = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.q_norm = nn.RMSNorm(3)
        self.sinks = nn.Parameter(torch.ones(2))
        self.experts = nn.ParameterDict(
            {
                "gate_up_proj": nn.Parameter(torch.ones(2, 3, 3)),
                "gate_up_proj_bias": nn.Parameter(torch.ones(2, 3)),
            }
        )
        self.frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)


@pytest.mark.parametrize("in_host", [False, True])
def test_weight_decay_applies_to_matrices_and_not_to_norms_and_biases(in_host: bool) -> None:
    layer = Layer()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(1.0)
    spec = OptimizerSpec(learning_rate=0.5, weight_decay=0.1)
    optimizer = build_optimizer(layer, spec, in_host=in_host)
    for parameter in layer.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    decayed = {name for name, value in layer.named_parameters() if bool((value < 1.0).all())}
    kept = {name for name, value in layer.named_parameters() if bool((value == 1.0).all())}
    assert decayed == {"embed_tokens.weight", "q_proj.weight", "experts.gate_up_proj"}
    assert kept == {
        *("q_proj.bias", "norm.weight", "norm.bias", "q_norm.weight"),
        *("sinks", "experts.gate_up_proj_bias", "frozen"),
    }
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
        id(p) for p in layer.parameters() if p.requires_grad
    }


MUON = OptimizerSpec(kind="muon", learning_rate=0.02, weight_decay=0.1)


class Stack(nn.Module):
    """Matrices inside and outside of layers, with sizes that two ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.layers = nn.ModuleList([nn.Linear(3, 7), nn.Linear(7, 3, bias=False)])


def _whole_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(model=Stack()))


def _gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(each.shape, generator=generator)
        for name, each in model.named_parameters()
    }


def _updated(
    model: nn.Module, whole: nn.Module, spec: OptimizerSpec = MUON, steps: int = 3
) -> dict[str, Tensor]:
    """Updates a model with the gradients of ``whole``, which has the same parameters on one rank."""
    optimizer = build_optimizer(model, spec)
    _update(model, whole, optimizer, range(steps))
    return _values(model)


def _update(
    model: nn.Module, whole: nn.Module, optimizer: torch.optim.AdamW, steps: Iterable[int]
) -> None:
    for step in steps:
        for name, gradient in _gradients(whole, step).items():
            parameter = model.get_parameter(name)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: each.full_tensor() if isinstance(each, DTensor) else each.detach()
        for name, each in model.named_parameters()
    }


def test_muon_updates_the_matrices_of_layers_and_adamw_the_rest() -> None:
    found, expected = _updated(_whole_model(), _whole_model()), _whole_model()
    matrices = {f"model.layers.{index}.weight" for index in range(2)}
    muon = torch.optim.Muon(
        [expected.get_parameter(name) for name in sorted(matrices)],
        lr=0.02,
        weight_decay=0.1,
        momentum=0.95,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in range(3):
        for name, gradient in _gradients(expected, step).items():
            expected.get_parameter(name).grad = gradient
        muon.step()
    rest = deepcopy(_whole_model())
    adamw = build_optimizer(rest, MUON.model_copy(update={"kind": "adamw"}))
    for step in range(3):
        for name, gradient in _gradients(rest, step).items():
            rest.get_parameter(name).grad = gradient
        adamw.step()
    for name, value in found.items():
        plain = (expected if name in matrices else rest).get_parameter(name)
        torch.testing.assert_close(value, plain.detach(), atol=1e-6, rtol=0, msg=name)


EIGHT_BITS = OptimizerSpec(kind="adamw_8bit", learning_rate=0.02, weight_decay=0.1)


class Matrices(nn.Module):
    """Matrices with blocks of several sizes, and one in float32; two ranks do not divide their rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(33, 512)
        self.up = nn.Linear(192, 47)
        self.small = nn.Linear(8, 5)
        self.experts = nn.Parameter(torch.randn(3, 20, 96))


MODELS = {"muon": (_whole_model, MUON), "adamw_8bit": (Matrices, EIGHT_BITS)}


def _sharded(rank: int, world_size: int, folder: str, kind: str) -> None:
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    make, spec = MODELS[kind]
    model = make()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = build_optimizer(model, spec)
    topology: Any = SimpleNamespace(rank=rank, world_size=world_size)
    checkpoint = ModelCheckpoint(model, optimizer, topology=topology)
    _update(model, make(), optimizer, range(2))
    checkpoint.save().write(Path(folder) / "checkpoint")
    _update(model, make(), optimizer, [2])
    found = _values(model)
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    distributed.destroy_process_group()


@pytest.mark.parametrize("kind", MODELS)
def test_updates_on_two_ranks_are_those_on_one(tmp_path: Path, kind: str) -> None:
    run_ranks(_sharded, 2, str(tmp_path), kind, count=2)
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    make, spec = MODELS[kind]
    for name, value in _updated(make(), make(), spec).items():
        torch.testing.assert_close(found[name], value, atol=1e-7, rtol=0, msg=name)

    resumed = make()
    optimizer = build_optimizer(resumed, spec)
    topology: Any = SimpleNamespace(rank=0, world_size=1)
    checkpoint = ModelCheckpoint(resumed, optimizer, topology=topology)
    checkpoint.load(tmp_path / "checkpoint", num_updates=2)
    _update(resumed, make(), optimizer, [2])
    for name, value in _values(resumed).items():
        torch.testing.assert_close(value, found[name], atol=1e-7, rtol=0, msg=name)


def test_moments_in_8_bits_have_the_values_of_the_dynamic_type() -> None:
    """The levels are those of torchao 0.18 and bitsandbytes 0.50 (``create_dynamic_map``)."""
    signed, unsigned = (levels_of_moments(is_signed=each) for each in (True, False))
    assert len(signed) == len(unsigned) == 256
    expected = torch.tensor([-0.99296875, -0.97890625, -0.96484375])
    torch.testing.assert_close(signed[:3], expected, atol=1e-7, rtol=0)
    expected = torch.tensor([0.0, 3.25e-7, 7.75e-7, 2.125e-6])
    torch.testing.assert_close(unsigned[:4], expected, atol=1e-12, rtol=1e-6)
    assert (signed == 0).nonzero().tolist() == [[127]]
    assert signed[-1] == unsigned[-1] == 1.0


def test_adamw_with_moments_in_8_bits_is_near_adamw() -> None:
    plain = EIGHT_BITS.model_copy(update={"kind": "adamw"})
    exact = _updated(Matrices(), Matrices(), plain, steps=10)
    start = dict(Matrices().named_parameters())
    for name, value in _updated(Matrices(), Matrices(), EIGHT_BITS, steps=10).items():
        moved = (exact[name] - start[name]).norm()
        error = (value - exact[name]).norm() / moved
        assert error < (0.03 if block_of_moments(tuple(value.shape)) else 1e-6), name


def test_matrices_have_one_byte_a_moment_and_a_scale_a_block() -> None:
    optimizer = build_optimizer(Matrices(), EIGHT_BITS)
    shapes = {name: tuple(each.shape) for name, each in Matrices().named_parameters()}
    used = sum(
        tensor.nbytes
        for state in optimizer.state.values()
        for name, tensor in state.items()
        if name != "step"
    )
    assert used == moment_bytes(shapes)
    assert block_of_moments((33, 512)) == 256
    assert block_of_moments((47, 192)) == 192
    assert block_of_moments((5_000, 16)) is None
    assert block_of_moments((512,)) is None


@pytest.mark.parametrize("part_bytes", [8, 40_000, 1 << 27])
def test_parts_of_moments_update_as_one(monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    expected = _updated(Matrices(), Matrices(), EIGHT_BITS)
    monkeypatch.setattr(adamw_module, "_PART_VALUES", part_bytes // 8)
    for name, value in _updated(Matrices(), Matrices(), EIGHT_BITS).items():
        torch.testing.assert_close(value, expected[name], atol=0, rtol=0, msg=name)
