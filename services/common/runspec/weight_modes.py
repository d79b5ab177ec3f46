"""How weights travel: what has to be known of a mode and of a transport before it starts. No torch here.

A new mode is a module of ``services/weightsync/modes`` and a line in ``MODES``; a new transport is a function
like those of ``services/weightsync/group.py`` and a line in ``TRANSPORTS``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """A collective backend."""

    opener: str
    """``module:function`` that takes a store, a seat, a host, a timeout and a device, and returns a process
    group."""
    device: str | None = None
    """Type of the devices that it carries between; None for any that all members share."""
    least_rate: float
    """Slowest wire that a deadline still allows for, in bytes per second."""
    ends_at_abort: bool = False
    """Whether an abort ends what is pending; otherwise that has deadlines."""


BUCKET_BYTES: Final[Mapping[str, int]] = {"cuda": 512 << 20, "cpu": 64 << 20}
"""Bytes of one collective by the device that weights travel from, unless the run says so."""
HANDLE: Final = "handle"
"""What members take that share a device, between whose processes NCCL sends nothing."""
TRANSPORTS: Final[Mapping[str, Transport]] = {
    "nccl": Transport(
        opener="services.weightsync.group:open_nccl",
        device="cuda",
        least_rate=5e9,
        ends_at_abort=True,
    ),
    "gloo": Transport(
        opener="services.weightsync.group:open_gloo",
        device="cpu",
        least_rate=100e6,
    ),
    HANDLE: Transport(
        opener="services.weightsync.handle:open_handle",
        least_rate=1e9,
        ends_at_abort=True,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMode:
    """A value of ``weight_sync.mode``."""

    sender: str = "services.weightsync.modes.shadow:ShadowSender"
    """``module:name`` of what makes a ``Sender`` from a plan, a device and the number of the source."""
    receiver: str
    """``module:name`` of what makes a ``Receiver`` from a plan, the devices and the sink of the weights."""
    through_host: bool = False
    """Whether weights travel from host memory to host memory, whatever the devices are."""
    is_in_place: bool = False
    """Whether they are received straight into the live ones."""
    lends: bool = False
    """Whether a receiver has what one source sent as it came, so that it can send it on."""
    keeps_rows: bool = False
    """Whether rows of several sources are kept as they came, beside the whole tensors."""

    def wire_device(self, device: str) -> str:
        """Type of device that the weights of a device travel from and to."""
        return "cpu" if self.through_host else device.partition(":")[0]


HOST_MODE: Final = "cpu_async"
"""What members take that can reach each other in no other mode."""
MODES: Final[Mapping[str, WeightMode]] = {
    "shadow": WeightMode(receiver="services.weightsync.modes.shadow:shadow_receiver", lends=True),
    "inplace": WeightMode(
        receiver="services.weightsync.modes.inplace:InplaceReceiver", is_in_place=True
    ),
    HOST_MODE: WeightMode(
        sender="services.weightsync.modes.cpu_async:HostSender",
        receiver="services.weightsync.modes.cpu_async:HostReceiver",
        through_host=True,
    ),
    "delta": WeightMode(
        sender="services.weightsync.modes.delta:DeltaSender",
        receiver="services.weightsync.modes.delta:DeltaReceiver",
        lends=True,
        keeps_rows=True,
    ),
}


def transport_of(device: str) -> str:
    """Name of the transport between devices of a type."""
    return next(name for name, transport in TRANSPORTS.items() if transport.device == device)


def weight_mode(name: str) -> WeightMode:
    """The mode of a name.

    Raises:
        ValueError: If there is none.
    """
    if name not in MODES:
        raise ValueError(f"weight_sync.mode must be one of {', '.join(MODES)}, but is {name!r}")
    return MODES[name]
