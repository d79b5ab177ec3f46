"""Rooms: memory of one process that others of the same host see as it changes, named by a handle.

On a GPU it lies outside of torch's allocator; on a CPU it is a file without a name. A handle is plain JSON,
and who reads one opens nothing but a room.
"""

import json
import mmap
import os
import uuid
import weakref
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from services.weightsync import cuda_memory

_NAME = "slipstream-"


class RoomError(RuntimeError):
    """A room that cannot be lent or opened here; the message says why."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that is lent."""

    memory: Tensor
    """``[num_bytes]`` uint8."""
    handle: str
    """What others open it with."""


def lend(num_bytes: int, device: torch.device) -> Room:
    """Make a room; it is there as long as its memory is kept.

    Raises:
        RoomError: If the device has none to lend.
    """
    try:
        if device.type == "cuda":
            memory, handle = cuda_memory.allocate(num_bytes, device)
            parts: dict[str, str | int] = {"device": gpu_of(device), "handle": handle.hex()}
        else:
            memory, parts = _lend_file(num_bytes)
    except (OSError, AttributeError, cuda_memory.CudaMemoryError) as error:
        raise RoomError(f"memory of {device} cannot be lent: {error}") from error
    return Room(memory, json.dumps({"num_bytes": num_bytes, **parts}))


def open_room(handle: str, device: torch.device) -> Tensor:
    """The memory of a room of the same device: ``[num_bytes]`` uint8.

    Raises:
        RoomError: If it cannot be opened here, as between hosts, or containers that see no processes of each
            other.
    """
    # A room that is open is not opened again: CUDA allows that only since some version.
    opened = _OPENED.get(handle)
    if opened is None:
        try:
            opened = _open(handle, device)
        except (OSError, ValueError, KeyError, TypeError, cuda_memory.CudaMemoryError) as error:
            raise RoomError(
                f"memory that another process lends cannot be opened: {error}"
            ) from error
        _OPENED[handle] = opened
    return opened


def gpu_of(device: torch.device) -> str:
    """Which GPU of the world a device is."""
    return f"cuda:{torch.cuda.get_device_properties(device).uuid}"


_OPENED: MutableMapping[str, Tensor] = weakref.WeakValueDictionary()


def _open(handle: str, device: torch.device) -> Tensor:
    parts = json.loads(handle)
    num_bytes = int(parts["num_bytes"])
    here = gpu_of(device) if device.type == "cuda" else "cpu"
    if parts["device"] != here:
        raise ValueError(f"it lies on {parts['device']}, but this member is on {here}")
    if device.type == "cuda":
        return cuda_memory.open_handle(bytes.fromhex(parts["handle"]), num_bytes, device)
    return _open_file(str(parts["name"]), int(parts["process"]), int(parts["file"]), num_bytes)


def _lend_file(num_bytes: int) -> tuple[Tensor, dict[str, str | int]]:
    name = _NAME + uuid.uuid4().hex
    file = os.memfd_create(name)
    os.ftruncate(file, num_bytes)
    memory = mmap.mmap(file, num_bytes)
    # Others open it by its number.
    weakref.finalize(memory, os.close, file)
    parts: dict[str, str | int] = {"device": "cpu", "name": name}
    parts |= {"process": os.getpid(), "file": file}
    return torch.frombuffer(memory, dtype=torch.uint8), parts


def _open_file(name: str, process: int, file: int, num_bytes: int) -> Tensor:
    path = Path(f"/proc/{process}/fd/{file}")
    # In another container the same number is another process.
    if not name.startswith(_NAME) or str(path.readlink()) != f"/memfd:{name} (deleted)":
        raise ValueError(f"process {process} of this host is not the one that lends it")
    opened = os.open(path, os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(opened, num_bytes), dtype=torch.uint8)
    finally:
        os.close(opened)
