"""``shadow``: received into a second copy while generation goes on, adopted by one copy between two steps."""

import torch
from torch import Tensor

from services.common.weightsync.arena import WeightArena, whole_tensors
from services.common.weightsync.endpoints import WeightSink, WeightSource
from services.common.weightsync.group import WeightGroup
from services.common.weightsync.modes.base import pack_weights
from services.common.weightsync.plan import WeightPlan
from services.common.weightsync.transfer import (
    TransferError,
    TransferOrder,
    Transferred,
    receive_version,
    send_version,
)


class ShadowSender:
    """Sends its arena, bucket by bucket."""

    def __init__(self, plan: WeightPlan, device: torch.device, source: int) -> None:
        self.plan = plan
        self.held_version = -1
        self._arena = WeightArena(plan, device, source=source)
        self._packed_version = -1
        self._checksums: Tensor | None = None

    def pack(self, source: WeightSource, version: int) -> None:
        """Copy the current weights into the arena."""
        if version != self._packed_version:
            self._packed_version = -1
            self._checksums = pack_weights(source, self._arena)
            self._packed_version = version

    def send(self, group: WeightGroup, order: TransferOrder) -> Transferred:
        """Send the arena."""
        if self._checksums is None:
            raise TransferError(f"version {order.version} was not prepared here; prepare it first")
        return send_version(group, self._arena, self._checksums, order)


class ShadowReceiver:
    """Receives into a shadow on the engine's device."""

    def __init__(self, plan: WeightPlan, device: torch.device, sink: WeightSink) -> None:
        self.plan = plan
        self.held_version = -1
        self._sink = sink
        self._shadow = WeightArena(plan, device)

    async def prepare(self) -> None:
        """The shadow is always ready."""

    def receive(self, group: WeightGroup, order: TransferOrder) -> Transferred:
        """Receive into the shadow."""
        return receive_version(group, self._shadow, order)

    async def adopt(self, version: int) -> float:
        """Copy the shadow into the live weights."""
        return await self._sink.adopt_weights(version, whole_tensors(self._shadow))

    async def give_up(self) -> None:
        """Collectives over Gloo that were given up may still write, so they keep the old shadow."""
        if self._shadow.device.type == "cpu":
            self._shadow = WeightArena(self.plan, self._shadow.device)
