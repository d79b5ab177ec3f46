"""Small models and their updates with random gradients, on one rank or sharded over several."""

from collections import OrderedDict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from services.common.runspec.trainer import OptimizerSpec
from services.trainer.engines.fsdp.optim import build_optimizer

MUON = OptimizerSpec(kind="muon", learning_rate=0.02, weight_decay=0.1)
EIGHT_BITS = OptimizerSpec(kind="adamw_8bit", learning_rate=0.02, weight_decay=0.1)


class Stack(nn.Module):
    """Model with matrices inside and outside of layers, whose sizes two ranks cannot split evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.layers = nn.ModuleList([nn.Linear(3, 7), nn.Linear(7, 3, bias=False)])


def whole_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(model=Stack()))


def random_gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(parameter.shape, generator=generator)
        for name, parameter in model.named_parameters()
    }


def updated(
    model: nn.Module, whole: nn.Module, spec: OptimizerSpec = MUON, steps: int = 3
) -> dict[str, Tensor]:
    """Updates a model with random gradients and returns its parameters.

    The gradients are those of ``whole``, the same model on one rank.
    """
    optimizer = build_optimizer(model, spec)
    update(model, whole, optimizer, range(steps))
    return values_of(model)


def update(
    model: nn.Module, whole: nn.Module, optimizer: torch.optim.AdamW, steps: Iterable[int]
) -> None:
    for step in steps:
        for name, gradient in random_gradients(whole, step).items():
            parameter = model.get_parameter(name)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        for name, parameter in model.named_parameters()
    }


class Matrices(nn.Module):
    """Matrices of several block sizes and one in float32; two ranks cannot split their rows evenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(33, 512)
        self.up = nn.Linear(192, 47)
        self.small = nn.Linear(8, 5)
        self.experts = nn.Parameter(torch.randn(3, 20, 96))
