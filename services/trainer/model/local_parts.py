"""What a rank holds of tensors that are spread over ranks."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; all of it if it is not spread."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def spread_like(local: Tensor, tensor: Tensor) -> Tensor:
    """A tensor of which this rank holds ``local``, spread as another one is; ``local`` if that is not.

    Args:
        local: Of the shape of the other one's local part, on any device.
        tensor: The other one.
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
