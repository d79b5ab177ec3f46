"""``cpu_async``: transfer through pinned host memory and Gloo, for members without a common NCCL.

For example members in different zones, or on CPUs and GPUs. Copies to and from the host overlap
with the wire, training and generation.
"""

from collections.abc import Sequence

import torch

from services.extras.weight_modes.sending import StagedSender
from services.weightsync.arena import WeightArena
from services.weightsync.endpoints import WeightSink
from services.weightsync.modes.shadow import MultiSourceReceiver
from services.weightsync.modes.staged import Slots
from services.weightsync.weight_plan import WeightPlan

_HOST = torch.device("cpu")


class HostSender(StagedSender):
    """Sends its arena through two pinned buffers."""

    def __init__(self, plan: WeightPlan, device: torch.device, source: int) -> None:
        arena = WeightArena(plan, device, source=source)
        super().__init__(plan, Slots(plan, _HOST, pinned=device.type == "cuda"), lambda: arena)


class HostReceiver(MultiSourceReceiver):
    """Receives through two pinned buffers per source into the shadow."""

    def __init__(self, plan: WeightPlan, devices: Sequence[torch.device], sink: WeightSink) -> None:
        slots = Slots(plan, _HOST, pinned=devices[0].type == "cuda")
        super().__init__(plan, devices, sink, slots)
