"""Properties of ``weight_sync.mode: servers`` and of its transport. Imports no torch.

The mode has its own transport, because the rollout, which the controller sees as the member of the
weight group, only orders the transfers: the members that receive are the workers of its servers.
"""

from dataclasses import dataclass
from typing import Final

from services.common.runspec.weight_modes import Transport, WeightMode

_DEVICE: Final = "servers"
"""Device type of all members, so that the controller chooses the transport with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServersMode(WeightMode):
    """A mode whose transport is the same for members with and without a GPU."""

    def wire_device(self, device: str) -> str:
        return _DEVICE


MODE: Final = ServersMode(
    receiver="services.extras.fleets.direct.receiver:DirectReceiver",
    engines=("vllm-server",),
)
TRANSPORT: Final = Transport(
    opener="services.extras.fleets.direct.opener:open_servers",
    device=_DEVICE,
    least_rate=500e6,
    ends_at_abort=True,
)
