"""``cpu_async``: through pinned host memory and Gloo, for members that share no NCCL.

Other zones, or CPUs beside GPUs. Copies to and from the host run beside the wire, training and generation.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.weightsync.arena import WeightArena
from services.weightsync.endpoints import WeightSink, WeightSource
from services.weightsync.group import WeightGroup
from services.weightsync.modes.base import pack_weights
from services.weightsync.modes.shadow import ShadowReceiver
from services.weightsync.modes.staged import Slots, receive_staged, send_staged
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
        """Copy the current weights into the arena."""
        if version != self._packed_version:
            self._packed_version = -1
            pack_weights(source, self._arena)
            self._packed_version = version

    def send(self, group: WeightGroup, order: TransferOrder) -> Transferred:
        """Send the arena."""
        return send_staged(group, self._arena, self._slots, order)


class HostReceiver(ShadowReceiver):
    """Receives into two pinned buffers, and from there into the shadow on the engine's device."""

    def __init__(self, plan: WeightPlan, devices: Sequence[torch.device], sink: WeightSink) -> None:
        super().__init__(plan, devices, sink)
        self._slots = Slots(plan, _HOST, pinned=devices[0].type == "cuda")

    async def give_up(self) -> None:
        """Collectives that were given up may still write, so they keep the old buffers."""
        self.held_version = -1
        self._slots = self._slots.renewed()

    def _receive(
        self, group: WeightGroup, shadow: WeightArena, order: TransferOrder
    ) -> Transferred:
        def place(source: int, index: int, received: Tensor) -> None:
            shadow.bucket(source, index).copy_(received)

        return receive_staged(group, self._slots, order, place)
