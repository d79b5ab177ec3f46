"""Copying many tensors of a device at once, at the speed of its memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Bytes from which a copy of its own is faster than a share of a kernel. Copying 6.17 GB of a 3B model in 434
# tensors on an H200 took 3.7 ms so, 4.5 ms with shared kernels alone, 4.3 ms one by one, 3.0 ms in one piece.
_LARGE = 2 << 20


def copy_all(places: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy each tensor to its place; on a GPU nothing is waited for.

    Args:
        places: Where they go, of the same shapes.
        tensors: What is copied, on the same device.
    """
    pairs = list(zip(places, tensors, strict=True))
    small = [pair for pair in pairs if pair[0].nbytes < _LARGE]
    if small:
        torch._foreach_copy_([place for place, _ in small], [tensor for _, tensor in small])
    for place, tensor in pairs:
        if place.nbytes >= _LARGE:
            place.copy_(tensor, non_blocking=True)
