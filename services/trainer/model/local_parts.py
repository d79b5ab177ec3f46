"""Conversion between sharded tensors and the part that a rank holds."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """Returns the part that this rank holds of a tensor; the whole tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def spread_like(local: Tensor, tensor: Tensor, *, shape: Sequence[int] | None = None) -> Tensor:
    """Wraps ``local`` as this rank's part of a tensor that is sharded like ``tensor``.

    Returns ``local`` itself if ``tensor`` is not sharded.

    Args:
        local: This rank's part, on any device.
        tensor: Tensor that defines the sharding.
        shape: Shape of the whole; None for that of ``tensor``.
    """
    if not isinstance(tensor, DTensor):
        return local
    whole = tensor if shape is None else torch.empty(shape, device="meta")
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
