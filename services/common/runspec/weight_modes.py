"""Properties of weight modes and transports that are needed before a transfer starts. Imports no torch.

A mode is a module like those in ``services/weightsync/modes``, and a transport a function like those in
``services/weightsync/group.py``; each has an entry point in the group ``slipstream.weight_modes`` or
``slipstream.weight_transports``.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from services.common.doors import Door

STAGING_SLOTS: Final = 2
"""Buffers of a bucket's size for each sender, through which a receiver places buckets."""
MIN_BUCKET_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """A collective backend."""

    opener: str
    """Reference ``module:function`` of a function that takes a store, a rank assignment, a host, a
    timeout and a device, and returns a process group."""
    device: str | None = None
    """Type of the devices that the transport connects; None for any device that all members share."""
    least_rate: float
    """Lowest bandwidth that deadlines allow for, in bytes per second."""
    latency_s: float = 1.5
    """Seconds that deadlines allow for in addition to the time of the bytes."""
    ends_at_abort: bool = False
    """True if an abort ends pending operations; otherwise only their deadlines do."""
    check: str = ""
    """For a stored transport, reference of a function of the folder or URL of the versions that raises a
    ServiceError if this process cannot use it."""
    reports: str = ""
    """For a stored transport, reference of a coroutine that takes the run's id, the folder or URL, the
    ``WeightSession`` and a function that records a ``Note``, and records events about the store."""
    is_stored: bool = False
    """True if sources leave versions in a store, from which each receiver loads them when it can. The
    opener then also takes ``url`` and ``source``, and returns a ``StoredBackend`` of
    ``services/weightsync/group.py``."""


BUCKET_BYTES: Final[Mapping[str, int]] = {"cuda": 512 << 20, "cpu": 64 << 20}
"""Default bytes of one collective, by the device type that sends the weights."""
HANDLE: Final = "handle"
"""Transport between processes that share a device, which NCCL does not support."""
TRANSPORTS: Final = Door("weight_transports", Transport)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMode:
    """A value of ``weight_sync.mode``."""

    sender: str = "services.weightsync.modes.shadow:ShadowSender"
    """Reference ``module:name`` of a callable that makes a ``Sender`` from a plan, a device and the
    number of the source."""
    receiver: str
    """Reference ``module:name`` of a callable that makes a ``Receiver`` from a plan, the devices
    and the sink of the weights."""
    through_host: bool = False
    """True if weights travel between host memories, regardless of the devices."""
    copies_to_host: bool = False
    """True if senders keep their copy of the weights in host memory, with buckets on the device."""
    is_in_place: bool = False
    """True if weights are received into the live weights."""
    sends_changes: bool = False
    """True if a sender can send the changes since the version before."""
    lends: bool = False
    """True if a receiver keeps the data of one source as received, so that it can send it to
    another member."""
    keeps_rows: bool = False
    """True if the receiver keeps the rows of several sources as received, in addition to the whole
    tensors."""
    engines: Collection[str] = ()
    """Engines whose servers receive the weights themselves; empty if the rollout receives them."""

    def wire_device(self, device: str) -> str:
        """Returns the device type between which the weights of a device travel."""
        return "cpu" if self.through_host else device.partition(":")[0]


HOST_MODE: Final = "cpu_async"
"""Mode for members that no other mode connects."""
MODES: Final = Door("weight_modes", WeightMode)
SHADOW: Final = WeightMode(receiver="services.weightsync.modes.shadow:shadow_receiver", lends=True)


def transport_of(device: str) -> str:
    """Returns the name of the transport between devices of a type."""
    return next(name for name, transport in TRANSPORTS.items() if transport.device == device)


def weight_mode(name: str) -> WeightMode:
    """Returns the mode with a name.

    Raises:
        ValueError: If the name is unknown.
    """
    if name not in MODES:
        raise ValueError(f"weight_sync.mode must be one of {', '.join(MODES)}, got {name!r}")
    return MODES[name]
