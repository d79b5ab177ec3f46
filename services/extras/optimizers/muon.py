"""Muon for the matrices of layers, AdamW for other parameters."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from services.trainer.collectives import local_part, spread_like


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
        super().__init__(list(groups), fused=True, **options)
        self._momentum = momentum
        for group in self.param_groups:
            for parameter in group["params"] if group["takes_muon"] else ():
                self.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    "momentum_buffer": torch.zeros_like(parameter),
                }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient. All ranks must call it.

        Drops the gradients of parameters that Muon updates.
        """
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
        # Nesterov's momentum. The orthogonalization below is not elementwise and needs the whole matrix.
        ahead = spread_like(gradient.lerp(buffer, self._momentum), parameter)
        full_gradient = ahead.full_tensor() if isinstance(ahead, DTensor) else ahead
        change = nn.Parameter(torch.zeros_like(full_gradient))
        change.grad = full_gradient
        torch.optim.Muon(
            [change],
            lr=group["lr"],
            weight_decay=0.0,
            momentum=0.0,
            nesterov=False,
            adjust_lr_fn="match_rms_adamw",
        ).step()
        local_change = change.detach()
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            same = DTensor.from_local(
                local_change, mesh, [Replicate()] * mesh.ndim, run_check=False
            )
            local_change = same.redistribute(placements=parameter.placements).to_local()
        weight = local_part(parameter.detach())
        weight.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(local_change)
        state["step"] += 1
