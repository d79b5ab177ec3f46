"""A version of all weights in one file, for worker processes of the same host."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

_ALIGNMENT = 64


def shared_memory() -> str | None:
    """Where a file costs no disk."""
    folder = Path("/dev/shm")  # noqa: S108 -- the workers read it before this process deletes it
    return str(folder) if folder.is_dir() else None


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor]
) -> tuple[int, list[tuple[str, str, list[int], int]]]:
    """Lay tensors out in a file; returns its size and where each lies."""
    entries: list[tuple[str, str, list[int], int]] = []
    size = 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append((name, dtype, list(tensor.shape), size))
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    for tensor, (_, _, shape, offset) in zip(tensors.values(), entries, strict=True):
        target = buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(shape)
        target.copy_(tensor)
    return size, entries
