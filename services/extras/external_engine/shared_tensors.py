"""Shares tensors with other processes of the same host, without copying them over a socket.

CPU tensors are copied into a memory-backed file. GPU tensors stay in place; processes exchange CUDA handles
of their memory.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64


@contextmanager
def shared(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Lets other processes read tensors while the block runs.

    Args:
        tensors: All on the CPU, or all on GPUs.

    Yields:
        Description that :func:`open_shared` takes.
    """
    if next(iter(tensors.values())).device.type == "cuda":
        # Contiguous copies must live as long as they are shared.
        dense = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        yield json.dumps(_cuda_handles(dense))
        return
    with tempfile.NamedTemporaryFile(dir=_memory_folder()) as file:
        yield json.dumps(_write(file.name, tensors))


@contextmanager
def shared_buffers(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """Shares buffers whose changes other processes see, if they open them while the block runs.

    Args:
        tensors: All on the CPU, or all on GPUs. On GPUs, these tensors are the shared buffers.

    Yields:
        Description that :func:`open_shared` takes, and the buffers, initialized with the tensors' values.
    """
    with shared(tensors) as description:
        is_cuda = next(iter(tensors.values())).is_cuda
        yield description, tensors if is_cuda else open_shared(description)


def open_shared(description: str) -> dict[str, Tensor]:
    """Opens tensors that another process shares; on a CPU they remain valid after it stops sharing."""
    described = json.loads(description)
    if "path" in described:
        # The file may be deleted while the tensors exist.
        buffers = [
            torch.from_file(
                described["path"], shared=True, size=described["size"], dtype=torch.uint8
            )
        ]
    else:
        buffers = [_open_cuda(handle) for handle in described["handles"]]
    typed: dict[tuple[int, torch.dtype], Tensor] = {}
    opened = {}
    for name, buffer, offset, shape, stride, dtype in _entries(described["tensors"]):
        buffer_view = typed.get((buffer, dtype))
        if buffer_view is None:
            size = buffers[buffer].nbytes // dtype.itemsize * dtype.itemsize
            buffer_view = typed[buffer, dtype] = buffers[buffer][:size].view(dtype)
        # One operation per tensor: a model has hundreds, and decoding waits.
        opened[name] = buffer_view.as_strided(shape, stride, offset)
    return opened


_Entry = tuple[str, int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


@lru_cache(maxsize=4)
def _entries(described: str) -> tuple[_Entry, ...]:
    """Returns name, buffer, first element, shape, strides and dtype of each described tensor."""
    entries = []
    for name, buffer, offset, shape, dtype_name in json.loads(described):
        dtype = getattr(torch, dtype_name)
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        stride = tuple(strides[-len(shape) :]) if shape else ()
        entries.append((name, buffer, offset // dtype.itemsize, tuple(shape), stride, dtype))
    return tuple(entries)


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
    return {"path": path, "size": size, "tensors": json.dumps(entries)}


def _memory_folder() -> str | None:
    """Returns a folder whose files are in memory, if the host has one."""
    folder = Path("/dev/shm")  # noqa: S108 -- the workers read it before this process deletes it
    return str(folder) if folder.is_dir() else None


def _cuda_handles(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns handles of the tensors' memory blocks: usually one, the arena of a received version."""
    layouts = tuple((name, tensor.data_ptr(), tensor.shape) for name, tensor in tensors.items())
    if layouts not in _DESCRIBED:
        _DESCRIBED.clear()
        _DESCRIBED[layouts] = _describe(tensors)
    owners, described = _DESCRIBED[layouts]
    handles = []
    for owner in owners:
        fields = tensors[owner].untyped_storage()._share_cuda_()
        handles.append([field.hex() if isinstance(field, bytes) else field for field in fields])
    for device in {tensors[owner].device for owner in owners}:
        torch.cuda.synchronize(device)
    return {"handles": handles, "tensors": described}


_DESCRIBED: dict[Any, tuple[list[str], str]] = {}
"""Result of :func:`_describe` for the newest tensors: the arena of received versions stays in place."""


def _describe(tensors: Mapping[str, Tensor]) -> tuple[list[str], str]:
    """Returns the name of one tensor in each memory block, and the description of all tensors."""
    owners: list[str] = []
    numbers: dict[int, int] = {}
    entries = []
    for name, tensor in tensors.items():
        block = tensor.untyped_storage().data_ptr()
        if block not in numbers:
            numbers[block] = len(owners)
            owners.append(name)
        offset = int(tensor.storage_offset()) * tensor.itemsize
        entries.append(_entry(name, numbers[block], offset, tensor))
    return owners, json.dumps(entries)


def _open_cuda(handle: list[Any]) -> Tensor:
    fields = [bytes.fromhex(field) if isinstance(field, str) else field for field in handle]
    torch.cuda.init()
    storage = torch.UntypedStorage._new_shared_cuda(*fields)  # noqa: SLF001 -- the counterpart
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
