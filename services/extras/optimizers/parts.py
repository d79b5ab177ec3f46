"""AdamW's update of parts of weights and moments."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.adamw import adamw


def update_parts(
    group: Mapping[str, Any],
    *,
    weights: list[Tensor],
    gradients: list[Tensor],
    first_moments: list[Tensor],
    second_moments: list[Tensor],
    steps: list[Tensor],
) -> None:
    """Updates weights, moments and steps in place with torch's fused AdamW.

    Args:
        group: Parameter group with the options of ``torch.optim.AdamW``.
        weights: Parts on this rank; the other lists have an entry for each, of its shape.
        steps: Number of updates before this one, scalars.
    """
    beta1, beta2 = group["betas"]
    adamw(
        weights,
        gradients,
        first_moments,
        second_moments,
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
