"""AdamW, Muon and gradient clipping."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, Replicate

from services.common.runspec.trainer import OptimizerSpec
from services.trainer.collectives import local_part, spread_like
from services.trainer.engines.fsdp.adamw import AdamW8bit, HostAdamW


def build_optimizer(
    module: nn.Module, spec: OptimizerSpec, *, in_host: bool = False
) -> torch.optim.AdamW:
    """Creates AdamW with one fused kernel, AdamW with moments in 8 bits, or Muon for matrices.

    The caller sets the learning rate before every update.

    Args:
        module: Module whose trainable parameters are updated; it must be on its device already.
        spec: Peak learning rate, betas and decay.
        in_host: True if the moments are kept in host memory.
    """
    # The fused kernel does not accept parameters of several meshes at once.
    by_group: dict[tuple[object, bool, bool], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            takes_muon = spec.kind == "muon" and _is_layer_matrix(name, parameter)
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
    options: dict[str, Any] = {
        "lr": spec.learning_rate,
        "betas": spec.betas,
    }
    if in_host:
        return HostAdamW(groups, **options)
    if spec.kind == "adamw_8bit":
        return AdamW8bit(groups, **options)
    if spec.kind == "muon":
        return MuonWithAdamW(groups, momentum=spec.momentum, fused=True, **options)
    return torch.optim.AdamW(groups, fused=True, **options)


class MuonWithAdamW(torch.optim.AdamW):
    """Muon for the groups with ``takes_muon``, AdamW for the others.

    The momentum is sharded like its weight. For its update, each matrix is gathered and orthogonalized by
    ``torch.optim.Muon`` on every rank, which keeps its own part: the result does not depend on the sharding.

    Args:
        groups: Parameter groups with the key ``takes_muon``.
        **options: Options of ``torch.optim.AdamW``.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], *, momentum: float, **options: Any
    ) -> None:
        super().__init__(list(groups), **options)
        self._momentum = momentum
        for group in self.param_groups:
            for parameter in group["params"] if group["takes_muon"] else ():
                self.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    "momentum_buffer": torch.zeros_like(parameter),
                }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates all parameters with a gradient; drops the gradients of Muon's. All ranks must call it."""
        for group in self.param_groups:
            for parameter in group["params"] if group["takes_muon"] else ():
                if parameter.grad is not None:
                    self._orthogonal_step(parameter, group)
                    parameter.grad = None  # AdamW skips it
        super().step()

    def _orthogonal_step(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state, gradient = self.state[parameter], local_part(parameter.grad)
        buffer = local_part(state["momentum_buffer"])
        buffer.lerp_(gradient, 1.0 - self._momentum)
        # Nesterov's momentum; what follows is not elementwise and needs the whole matrix.
        ahead = spread_like(gradient.lerp(buffer, self._momentum), parameter)
        whole = ahead.full_tensor() if isinstance(ahead, DTensor) else ahead
        change = nn.Parameter(torch.zeros_like(whole))
        change.grad = whole
        torch.optim.Muon(
            [change],
            lr=group["lr"],
            weight_decay=0.0,
            momentum=0.0,
            nesterov=False,
            adjust_lr_fn="match_rms_adamw",
        ).step()
        own = change.detach()
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            same = DTensor.from_local(own, mesh, [Replicate()] * mesh.ndim, run_check=False)
            own = same.redistribute(placements=parameter.placements).to_local()
        weight = local_part(parameter.detach())
        weight.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(own)
        state["step"] += 1


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
    shards = [local_part(each) for each in gradients]
    if shards:
        torch._foreach_mul_(shards, factor.to(shards[0].device))
