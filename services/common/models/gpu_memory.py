"""Check of a GPU's free memory by the process that is about to use it."""

import time
from typing import Final

import torch

from services.common.gpus import GpuMemory, gpu_memory

# The driver takes a moment to release the memory of the process that this one replaces.
_RELEASE_S: Final = 10.0
_LOOK_EVERY_S: Final = 0.5


def check_free_memory(needed: float, device: torch.device) -> None:
    """Checks that a GPU which this process has to itself has enough free memory.

    Args:
        needed: Bytes that this process needs.

    Raises:
        ValueError: If other processes hold too much of the memory; the message names them.
    """
    deadline = time.monotonic() + _RELEASE_S
    while shortage := _memory_of(device).shortage(needed):
        if time.monotonic() > deadline:
            raise ValueError(shortage)
        time.sleep(_LOOK_EVERY_S)


def _memory_of(device: torch.device) -> GpuMemory:
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    free, total = torch.cuda.mem_get_info(device)
    queried = next((gpu for gpu in gpu_memory() if gpu.uuid == uuid), None)
    processes = queried.processes if queried is not None else ()
    return GpuMemory(queried.index if queried is not None else 0, uuid, total, free, processes)
