"""Properties of the modes. Imports no torch."""

from typing import Final

from services.common.runspec.weight_modes import WeightMode

INPLACE: Final = WeightMode(
    receiver="services.extras.weight_modes.inplace:InplaceReceiver", is_in_place=True
)
CPU_ASYNC: Final = WeightMode(
    sender="services.extras.weight_modes.cpu_async:HostSender",
    receiver="services.extras.weight_modes.cpu_async:HostReceiver",
    through_host=True,
)
DELTA: Final = WeightMode(
    sender="services.extras.weight_modes.delta:delta_sender",
    receiver="services.extras.weight_modes.delta:DeltaReceiver",
    sends_changes=True,
    lends=True,
    keeps_rows=True,
)
OFFLOADED: Final = WeightMode(
    sender="services.extras.weight_modes.offloaded:OffloadedSender",
    receiver="services.weightsync.modes.shadow:shadow_receiver",
    copies_to_host=True,
)
