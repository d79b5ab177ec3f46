"""Properties of the built-in weight transports and modes. Imports no torch."""

from typing import Final

from services.common.runspec.weight_modes import Transport, WeightMode

NCCL: Final = Transport(
    opener="services.weightsync.group:open_nccl",
    device="cuda",
    least_rate=5e9,
    ends_at_abort=True,
)
GLOO: Final = Transport(
    opener="services.weightsync.group:open_gloo",
    device="cpu",
    least_rate=100e6,
)
SHADOW: Final = WeightMode(receiver="services.weightsync.modes.shadow:shadow_receiver", lends=True)
INPLACE: Final = WeightMode(
    receiver="services.weightsync.modes.inplace:InplaceReceiver", is_in_place=True
)
CPU_ASYNC: Final = WeightMode(
    sender="services.weightsync.modes.cpu_async:HostSender",
    receiver="services.weightsync.modes.cpu_async:HostReceiver",
    through_host=True,
)
DELTA: Final = WeightMode(
    sender="services.weightsync.modes.delta:DeltaSender",
    receiver="services.weightsync.modes.delta:DeltaReceiver",
    lends=True,
    keeps_rows=True,
)
