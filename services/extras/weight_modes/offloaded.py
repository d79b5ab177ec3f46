"""``offloaded``: the trainer keeps its copy of the weights in pinned host memory, and sends between GPUs.

A trainer whose GPU has no memory for a copy of the weights copies them to the host, where they wait while
the next step changes them on the GPU. Each bucket returns through one of two slots on the GPU.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from services.extras.weight_modes.sending import send_staged
from services.weightsync.arena import WeightArena
from services.weightsync.endpoints import WeightSource, on_device
from services.weightsync.group import WeightGroup
from services.weightsync.modes.base import pack_weights
from services.weightsync.modes.staged import Slots
from services.weightsync.plan import WeightPlan
from services.weightsync.transfer import TransferOrder, Transferred

_HOST = torch.device("cpu")


class OffloadedSender:
    """Sends an arena in host memory through two slots on the device."""

    def __init__(self, plan: WeightPlan, device: torch.device, source: int) -> None:
        self.plan = plan
        self.held_version = -1
        self._packed_version = -1
        self._device = device
        self._slots = Slots(plan, device)
        # Pinned memory takes seconds for each 10 GB, in which this process must answer its peers.
        allocator = ThreadPoolExecutor(1, thread_name_prefix="pinned-memory")
        pinned = device.type == "cuda"
        self._arena = allocator.submit(_HostArena, plan, source=source, pinned=pinned)
        allocator.shutdown(wait=False)

    def pack(self, source: WeightSource, version: int) -> None:
        if version != self._packed_version:
            self._packed_version = -1
            with on_device(self._device):
                pack_weights(source, self._arena.result())
                if self._device.type == "cuda":
                    torch.cuda.current_stream().synchronize()
            self._packed_version = version

    def send(self, group: WeightGroup, order: TransferOrder) -> Transferred:
        return send_staged(group, self._arena.result(), self._slots, order)


class _HostArena(WeightArena):
    """Arena of a source in host memory that no other process opens."""

    def __init__(self, plan: WeightPlan, *, source: int, pinned: bool) -> None:
        self._pinned = pinned
        super().__init__(plan, _HOST, source=source)

    def _exportable(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
