"""The optimizer of a specification, and gradient clipping."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, Replicate

from services.common.callables import load_callable
from services.common.runspec.trainer import HOST_OPTIMIZERS, OPTIMIZERS, OptimizerSpec
from services.trainer.collectives import local_part


def build_optimizer(
    module: nn.Module, spec: OptimizerSpec, *, in_host: bool = False
) -> torch.optim.Optimizer:
    """Creates the optimizer that a specification names.

    The caller sets the learning rate before every update.

    Args:
        module: Module whose trainable parameters are updated; it must be on its device already.
        spec: Peak learning rate, betas and decay.
        in_host: True if its states are kept in host memory.

    Raises:
        DoorError: If the optimizer cannot be loaded.
    """
    kind = OPTIMIZERS[spec.kind]
    # The fused kernel does not accept parameters of several meshes at once.
    by_group: dict[tuple[object, bool, bool], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            takes_muon = kind.marks_matrices and _is_layer_matrix(name, parameter)
            key = mesh, decays(name, parameter), takes_muon
            by_group.setdefault(key, []).append(parameter)
    groups = [
        {
            "params": members,
            "weight_decay": spec.weight_decay if is_decayed else 0.0,
            "takes_muon": takes_muon,
        }
        for (_, is_decayed, takes_muon), members in by_group.items()
    ]
    options = {name: getattr(spec, name) for name in kind.options}
    make = HOST_OPTIMIZERS.load(spec.kind) if in_host else load_callable(kind.make)
    optimizer: torch.optim.Optimizer = make(
        groups, lr=spec.learning_rate, betas=spec.betas, **options
    )
    return optimizer


def fused_adamw(groups: list[dict[str, Any]], **options: Any) -> torch.optim.AdamW:
    """Creates AdamW with one fused kernel."""
    return torch.optim.AdamW(groups, fused=True, **options)


def _is_layer_matrix(name: str, parameter: Tensor) -> bool:
    """Returns True for matrices of a model's layers, whose updates Muon orthogonalizes."""
    return parameter.ndim == 2 and ".layers." in name and decays(name, parameter)


def decays(name: str, parameter: Tensor) -> bool:
    """Returns True if weight decay applies to a parameter: to matrices, including embeddings.

    Norms, biases and other vectors do not decay, as in Hugging Face's ``Trainer`` and Megatron-LM. The
    biases of fused experts have two dimensions and are recognized by name.
    """
    return parameter.ndim > 1 and not name.endswith("bias")


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


@torch.no_grad()
def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Computes the global norm of the gradients over all shards. All ranks must call it.

    Gradients are grouped by their sharding: one small reduction for each kind, instead of one for each
    parameter.

    Returns:
        Float32 scalar, the same on every rank.
    """
    local: dict[tuple[distributed.ProcessGroup, ...], list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            groups = tuple(
                gradient.device_mesh.get_group(dimension)
                for dimension, placement in enumerate(gradient.placements)
                if not isinstance(placement, Replicate)
            )
            local.setdefault(groups, []).append(gradient.to_local())
        else:
            local.setdefault((), []).append(gradient)
    total = torch.zeros(())
    for groups, gradients in local.items():
        norms = torch._foreach_norm([gradient.float() for gradient in gradients])  # noqa: SLF001
        square = torch.stack(norms).square().sum()
        if groups and parameters[0].device.type != square.device.type:
            square = square.to(parameters[0].device)
        for group in groups:
            distributed.all_reduce(square, group=group)
        total = total.to(square.device) + square
    return total.sqrt()


def clip_gradients(parameters: Sequence[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scales all gradients down so that their global norm is at most ``max_norm``."""
    scale_gradients(parameters, (max_norm / (norm + 1e-6)).clamp(max=1.0))


@torch.no_grad()
def scale_gradients(parameters: Sequence[nn.Parameter], factor: Tensor) -> None:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [local_part(gradient) for gradient in gradients]
    if shards:
        torch._foreach_mul_(shards, factor.to(shards[0].device))
