"""``offloaded``: the trainer keeps its copy of the weights in pinned host memory, and sends between GPUs.

A trainer whose GPU has no memory for a copy of the weights copies them to the host, where they wait while
the next step changes them on the GPU. Each bucket returns through one of two slots on the GPU.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from services.extras.weight_modes.sending import StagedSender
from services.weightsync.arena import WeightArena
from services.weightsync.endpoints import WeightSource, on_device
from services.weightsync.modes.staged import Slots
from services.weightsync.weight_plan import WeightPlan

_HOST = torch.device("cpu")


class OffloadedSender(StagedSender):
    """Sends an arena in host memory through two slots on the device."""

    def __init__(self, plan: WeightPlan, device: torch.device, source: int) -> None:
        self._device = device
        # Pinned memory takes seconds for each 10 GB, in which this process must answer its peers.
        allocator = ThreadPoolExecutor(1, thread_name_prefix="pinned-memory")
        pinned = device.type == "cuda"
        arena = allocator.submit(_HostArena, plan, source=source, pinned=pinned)
        allocator.shutdown(wait=False)
        super().__init__(plan, Slots(plan, device), arena.result)

    def _copy(self, source: WeightSource) -> None:
        with on_device(self._device):
            super()._copy(source)
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()


class _HostArena(WeightArena):
    """Arena of a source in host memory that no other process opens."""

    def __init__(self, plan: WeightPlan, *, source: int, pinned: bool) -> None:
        self._pinned = pinned
        super().__init__(plan, _HOST, source=source)

    def _exportable(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
