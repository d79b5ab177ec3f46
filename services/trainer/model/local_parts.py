"""Conversion between sharded tensors and the part that a rank holds."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """Returns the part that this rank holds of a tensor; the whole tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def spread_like(local: Tensor, tensor: Tensor) -> Tensor:
    """Wraps ``local`` as this rank's part of a tensor that is sharded like ``tensor``.

    Returns ``local`` itself if ``tensor`` is not sharded.

    Args:
        local: Tensor with the shape of ``tensor``'s local part, on any device.
        tensor: Tensor that defines shape and sharding.
    """
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
