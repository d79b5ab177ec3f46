"""Shared buffers: memory that other processes of this host open by a handle, on a GPU through CUDA's driver.

Torch can share its allocations, too, but not always those in expandable segments, which the trainer uses.
It also never frees memory that a dead reader had opened.
"""

import ctypes
import json
import mmap
import os
import uuid
import weakref
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HANDLE_BYTES = 64
_LAZY_PEERS = 1


class CudaMemoryError(RuntimeError):
    """Failed call of CUDA's driver; the message has the call and the reason."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _Memory:
    """Memory in the form that torch can wrap as a tensor; lives as long as the tensor."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 2,
        }


def allocate(num_bytes: int, device: torch.device) -> tuple[Tensor, bytes]:
    """Allocates memory of a GPU that can be exported.

    Returns:
        ``[num_bytes]`` uint8, and the handle with which other processes open it. The memory is
        freed with the tensor, but stays while another process has it open.

    Raises:
        CudaMemoryError: If there is not enough memory, or it cannot be exported.
    """
    address, handle = ctypes.c_uint64(), _Handle()
    with _context(device):
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        tensor = _tensor(address.value, num_bytes, device, end="cuMemFree_v2")
        _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return tensor, bytes(handle.reserved)


def open_handle(handle: bytes, num_bytes: int, device: torch.device) -> Tensor:
    """Opens memory that another process of this host has allocated on the same GPU.

    Args:
        device: That GPU, as this process numbers it.

    Raises:
        CudaMemoryError: If it cannot be opened here.
    """
    address = ctypes.c_uint64()
    lent = _Handle.from_buffer_copy(handle)
    with _context(device):
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), lent, ctypes.c_uint(_LAZY_PEERS))
        return _tensor(address.value, num_bytes, device, end="cuIpcCloseMemHandle")


def _tensor(address: int, num_bytes: int, device: torch.device, *, end: str) -> Tensor:
    memory = _Memory(address, num_bytes)
    # At the end of the process the driver frees it itself, and torch may already be unloaded.
    weakref.finalize(memory, _end, end, address, device).atexit = False
    return torch.as_tensor(memory, device=device)


def _end(name: str, address: int, device: torch.device) -> None:
    with _context(device):
        _call(name, ctypes.c_uint64(address))


@contextmanager
def _context(device: torch.device) -> Iterator[None]:
    """Makes torch's context of a GPU current, after its pending work has finished."""
    torch.cuda.synchronize(device)
    number = torch.cuda.current_device() if device.index is None else device.index
    context = ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(number))
    _call("cuCtxPushCurrent_v2", context)
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(context))
        _call("cuDevicePrimaryCtxRelease_v2", ctypes.c_int(number))


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code != 0:
        why = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(why))
        reason = (why.value or b"unknown error").decode()
        raise CudaMemoryError(f"CUDA driver call {name} failed: {reason} ({code})")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


_NAME = "slipstream-"


class SharedBufferError(RuntimeError):
    """A shared buffer cannot be exported or opened here; the message has the reason."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SharedBuffer:
    """Memory that this process exports to others."""

    memory: Tensor
    """``[num_bytes]`` uint8."""
    handle: str
    """Handle with which other processes open it."""


def export_buffer(num_bytes: int, device: torch.device) -> SharedBuffer:
    """Allocates and exports a shared buffer; it lives as long as its memory is referenced.

    Raises:
        SharedBufferError: If memory of the device cannot be allocated or exported.
    """
    try:
        if device.type == "cuda":
            memory, handle = allocate(num_bytes, device)
            facts: dict[str, str | int] = {"device": gpu_of(device), "handle": handle.hex()}
        else:
            memory, facts = _export_file(num_bytes)
    except (OSError, AttributeError, CudaMemoryError) as error:
        raise SharedBufferError(f"memory of {device} cannot be exported: {error}") from error
    buffer = SharedBuffer(memory, json.dumps({"num_bytes": num_bytes, **facts}))
    _EXPORTED[memory.untyped_storage().data_ptr()] = buffer
    return buffer


def exported_part(tensor: Tensor) -> tuple[str, int] | None:
    """Returns the handle of the exported buffer that a tensor is part of, and its first byte there.

    None if the tensor is not part of one.
    """
    buffer = _EXPORTED.get(tensor.untyped_storage().data_ptr())
    if buffer is None:
        return None
    return buffer.handle, int(tensor.storage_offset()) * tensor.itemsize


def open_buffer(handle: str, device: torch.device) -> Tensor:
    """Opens a shared buffer on the same device; returns ``[num_bytes]`` uint8.

    Raises:
        SharedBufferError: If it cannot be opened here, for example from another host, or from a container
            that does not see the other process.
    """
    # Reuse an open buffer: only newer CUDA versions allow opening it twice in one process.
    opened = _OPENED.get(handle)
    if opened is None:
        try:
            opened = _open(handle, device)
        except (OSError, ValueError, KeyError, TypeError, CudaMemoryError) as error:
            raise SharedBufferError(
                f"memory that another process exports cannot be mapped: {error}"
            ) from error
        _OPENED[handle] = opened
    return opened


def gpu_of(device: torch.device) -> str:
    """Returns the globally unique name of a GPU: ``cuda:`` and its UUID."""
    return f"cuda:{torch.cuda.get_device_properties(device).uuid}"


_OPENED: MutableMapping[str, Tensor] = weakref.WeakValueDictionary()
_EXPORTED: MutableMapping[int, SharedBuffer] = weakref.WeakValueDictionary()
"""Exported buffers of this process by their address."""


def _open(handle: str, device: torch.device) -> Tensor:
    facts = json.loads(handle)
    num_bytes = int(facts["num_bytes"])
    gpu = gpu_of(device) if device.type == "cuda" else "cpu"
    if facts["device"] != gpu:
        raise ValueError(f"the memory is on {facts['device']}, but this member is on {gpu}")
    if device.type == "cuda":
        return open_handle(bytes.fromhex(facts["handle"]), num_bytes, device)
    return _open_file(str(facts["name"]), int(facts["process"]), int(facts["file"]), num_bytes)


def _export_file(num_bytes: int) -> tuple[Tensor, dict[str, str | int]]:
    name = _NAME + uuid.uuid4().hex
    file = os.memfd_create(name)
    os.ftruncate(file, num_bytes)
    memory = mmap.mmap(file, num_bytes)
    # Other processes open the file by its descriptor, which must stay open as long as the memory.
    weakref.finalize(memory, os.close, file)
    facts: dict[str, str | int] = {"device": "cpu", "name": name}
    facts |= {"process": os.getpid(), "file": file}
    return torch.frombuffer(memory, dtype=torch.uint8), facts


def _open_file(name: str, process: int, file: int, num_bytes: int) -> Tensor:
    path = Path(f"/proc/{process}/fd/{file}")
    # In another container the same process id belongs to another process.
    if not name.startswith(_NAME) or str(path.readlink()) != f"/memfd:{name} (deleted)":
        raise ValueError(f"process {process} of this host is not the exporting process")
    opened = os.open(path, os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(opened, num_bytes), dtype=torch.uint8)
    finally:
        os.close(opened)
