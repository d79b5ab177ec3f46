"""``inplace``: receives directly into the live weights under a pause, if memory cannot hold a shadow.

A transfer that started and was not adopted leaves the live weights mixed or of an unverified
version: the engine stays paused until a complete version is adopted.
"""

from collections.abc import Sequence

import torch

from services.weightsync.endpoints import Place, WeightSink
from services.weightsync.group import WeightGroup
from services.weightsync.modes.staged import Slots, receive_staged
from services.weightsync.transfer import Transferred, TransferRequest
from services.weightsync.weight_plan import WeightPlan


class InplaceReceiver:
    """Receives through two slots per source into the engine's own parameters."""

    def __init__(self, plan: WeightPlan, devices: Sequence[torch.device], sink: WeightSink) -> None:
        self.plan = plan
        self.held_version = -1
        self._sink = sink
        self._slots = Slots(plan, devices[0])
        self._copy_slot: Place | None = None
        self._is_open = False
        self._is_written = False

    async def prepare(self) -> None:
        """Pauses the engine.

        Raises:
            ValueError: If its weights cannot be written in place, or differ from the plan.
        """
        self._is_open = True
        self._copy_slot = await self._sink.open_weights(self.plan, self._slots.buffers)

    def receive(self, group: WeightGroup, request: TransferRequest) -> Transferred:
        """Receives into the live weights; from now on nothing is served until they are adopted."""
        assert self._copy_slot is not None, "a transfer needs a preparation"
        self._is_written = True
        return receive_staged(group, self._slots, request, self._copy_slot)

    async def adopt(self, version: int) -> float:
        """Resumes with the weights that are in place."""
        stall_s = await self._sink.adopt_placed(version)
        self._is_open = self._is_written = False
        return stall_s

    async def give_up(self) -> None:
        """Resumes with the old weights if they are intact; otherwise refuses to serve."""
        self._slots = self._slots.renewed()
        if self._is_written:
            await self._sink.refuse_weights(
                "a transfer into the live weights did not end in an adoption; nothing is served "
                "until a whole version arrives"
            )
        elif self._is_open:
            await self._sink.close_weights()
            self._is_open = False
