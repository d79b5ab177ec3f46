"""GPU memory that another process of this host opens by a handle: CUDA's driver, called directly.

Torch's allocator lends memory, too, but not everywhere what lies in segments that grow, which the trainer
uses, and it keeps for ever what a reader that died had opened.
"""

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

HANDLE_BYTES = 64
_LAZY_PEERS = 1


class CudaMemoryError(RuntimeError):
    """The driver refused; the message says what and why."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _Memory:
    """What torch makes a tensor of; lives as long as that."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 2,
        }


def allocate(num_bytes: int, device: torch.device) -> tuple[Tensor, bytes]:
    """Take memory of a GPU.

    Returns:
        ``[num_bytes]`` uint8, and the handle by which other processes open it. It is freed with the tensor,
        but stays as long as somebody has it open.

    Raises:
        CudaMemoryError: If there is none, or it cannot be lent.
    """
    address, handle = ctypes.c_uint64(), _Handle()
    with _context(device):
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        tensor = _tensor(address.value, num_bytes, device, end="cuMemFree_v2")
        _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return tensor, bytes(handle.reserved)


def open_handle(handle: bytes, num_bytes: int, device: torch.device) -> Tensor:
    """Open what another process of this host has allocated on the same GPU.

    Args:
        handle: From :func:`allocate`.
        num_bytes: Its size.
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
    # At the end of the process the driver does it itself, and torch may not be there any more.
    weakref.finalize(memory, _end, end, address, device).atexit = False
    return torch.as_tensor(memory, device=device)


def _end(name: str, address: int, device: torch.device) -> None:
    with _context(device):
        _call(name, ctypes.c_uint64(address))


@contextmanager
def _context(device: torch.device) -> Iterator[None]:
    """Work in the context that torch has on a GPU, with nothing running in it."""
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
        told = (why.value or b"unknown error").decode()
        raise CudaMemoryError(f"CUDA's driver says to {name}: {told} ({code})")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
