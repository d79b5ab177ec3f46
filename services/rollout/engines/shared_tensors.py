"""Tensors that other processes of the same host read without a copy over a socket.

On a CPU they are laid out in a file in memory. Tensors of a GPU stay where they are: what travels is CUDA's
handle of their memory.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64


@contextmanager
def shared(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Let other processes read tensors while the block runs.

    Args:
        tensors: All on the CPU, or all on GPUs.

    Yields:
        Text that :func:`open_shared` takes.
    """
    if next(iter(tensors.values())).device.type == "cuda":
        # What had to be copied to lie in one piece lives as long as it is shared.
        dense = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        yield json.dumps(_cuda_handles(dense))
        return
    with tempfile.NamedTemporaryFile(dir=_memory_folder()) as file:
        yield json.dumps(_write(file.name, tensors))


@contextmanager
def shared_room(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """Room that other processes see as it changes, if they open it while the block runs.

    Args:
        tensors: All on the CPU, or all on GPUs. On GPUs the room is these tensors.

    Yields:
        Text that :func:`open_shared` takes, and the room, with what the tensors hold.
    """
    with shared(tensors) as description:
        is_cuda = next(iter(tensors.values())).is_cuda
        yield description, tensors if is_cuda else open_shared(description)


def open_shared(description: str) -> dict[str, Tensor]:
    """Return the tensors that another process shares; on a CPU they stay when it stops sharing."""
    described = json.loads(description)
    if "path" in described:
        # The file may go while the tensors are there.
        buffers = [
            torch.from_file(
                described["path"], shared=True, size=described["size"], dtype=torch.uint8
            )
        ]
    else:
        buffers = [_open_cuda(handle) for handle in described["handles"]]
    return {
        name: _view(buffers[buffer], offset, shape, getattr(torch, dtype))
        for name, buffer, offset, shape, dtype in described["tensors"]
    }


def _view(buffer: Tensor, offset: int, shape: list[int], dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return buffer[offset : offset + size].view(dtype).view(shape)


def _entry(name: str, buffer: int, offset: int, tensor: Tensor) -> list[Any]:
    return [name, buffer, offset, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]


def _write(path: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    entries, size = [], 0
    for name, tensor in tensors.items():
        entries.append(_entry(name, 0, size, tensor))
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    for tensor, (_, _, offset, shape, _) in zip(tensors.values(), entries, strict=True):
        _view(buffer, offset, shape, tensor.dtype).copy_(tensor)
    return {"path": path, "size": size, "tensors": entries}


def _memory_folder() -> str | None:
    """Where a file costs no disk."""
    folder = Path("/dev/shm")  # noqa: S108 -- the workers read it before this process deletes it
    return str(folder) if folder.is_dir() else None


def _cuda_handles(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Handles of the memory blocks that tensors lie in: usually one, the arena of a received version."""
    handles: list[list[Any]] = []
    known: dict[int, int] = {}
    entries = []
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known[storage.data_ptr()] = len(handles)
            shared_parts = storage._share_cuda_()
            handles.append(
                [part.hex() if isinstance(part, bytes) else part for part in shared_parts]
            )
        offset = int(tensor.storage_offset()) * tensor.itemsize
        entries.append(_entry(name, known[storage.data_ptr()], offset, tensor))
    for device in {tensor.device for tensor in tensors.values()}:
        torch.cuda.synchronize(device)
    return {"handles": handles, "tensors": entries}


def _open_cuda(handle: list[Any]) -> Tensor:
    parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in handle]
    torch.cuda.init()
    storage = torch.UntypedStorage._new_shared_cuda(*parts)  # noqa: SLF001 -- the counterpart
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
