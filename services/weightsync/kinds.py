"""Properties of the weight transports and of the mode of the core. Imports no torch."""

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
