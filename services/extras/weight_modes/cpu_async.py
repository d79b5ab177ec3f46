"""``cpu_async``: transfer through pinned host memory and Gloo, for members without a common NCCL.

For example members in different zones, or on CPUs and GPUs. Copies to and from the host overlap
with the wire, training and generation.
"""

from collections.abc import Sequence

import torch

from services.extras.weight_modes.sending import send_staged
from services.weightsync.arena import WeightArena
from services.weightsync.endpoints import WeightSink, WeightSource
from services.weightsync.group import WeightGroup
from services.weightsync.modes.base import pack_weights
from services.weightsync.modes.shadow import MultiSourceReceiver
from services.weightsync.modes.staged import Slots
from services.weightsync.plan import WeightPlan
from services.weightsync.transfer import TransferOrder, Transferred

_HOST = torch.device("cpu")


class HostSender:
    """Sends its arena through two pinned buffers."""

    def __init__(self, plan: WeightPlan, device: torch.device, source: int) -> None:
        self.plan = plan
        self.held_version = -1
        self._packed_version = -1
        self._arena = WeightArena(plan, device, source=source)
        self._slots = Slots(plan, _HOST, pinned=device.type == "cuda")

    def pack(self, source: WeightSource, version: int) -> None:
        if version != self._packed_version:
            self._packed_version = -1
            pack_weights(source, self._arena)
            self._packed_version = version

    def send(self, group: WeightGroup, order: TransferOrder) -> Transferred:
        return send_staged(group, self._arena, self._slots, order)


class HostReceiver(MultiSourceReceiver):
    """Receives through two pinned buffers per source into the shadow."""

    def __init__(self, plan: WeightPlan, devices: Sequence[torch.device], sink: WeightSink) -> None:
        slots = Slots(plan, _HOST, pinned=devices[0].type == "cuda")
        super().__init__(plan, devices, sink, slots)
