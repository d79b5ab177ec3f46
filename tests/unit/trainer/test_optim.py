"""The optimizer: which parameters its weight decay applies to."""

from collections import OrderedDict
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from services.common.runspec.trainer import OptimizerSpec
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


def _updated(model: nn.Module, steps: int = 3) -> dict[str, Tensor]:
    optimizer = build_optimizer(model, MUON)
    for step in range(steps):
        for name, gradient in _gradients(_whole_model(), step).items():
            parameter = model.get_parameter(name)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()
    return {
        name: each.full_tensor() if isinstance(each, DTensor) else each.detach()
        for name, each in model.named_parameters()
    }


def test_muon_updates_the_matrices_of_layers_and_adamw_the_rest() -> None:
    found, expected = _updated(_whole_model()), _whole_model()
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


def _sharded(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    model = _whole_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    found = _updated(model)
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    distributed.destroy_process_group()


def test_muon_on_two_ranks_is_that_of_one(tmp_path: Path) -> None:
    run_ranks(_sharded, 2, str(tmp_path), count=2)
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    for name, value in _updated(_whole_model()).items():
        torch.testing.assert_close(found[name], value, atol=1e-7, rtol=0, msg=name)
