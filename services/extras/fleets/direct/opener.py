"""Opens the transport ``servers``: what sends in the trainer, or what orders transfers in the rollout."""

from pathlib import Path
from typing import Any

import torch

from services.extras.fleets.direct.relay import GroupRelay
from services.extras.fleets.direct.source import ServersSource
from services.weightsync.group import RankAssignment


def open_servers(
    store: Any,
    assignment: RankAssignment,
    *,
    host: str,
    timeout_s: float,
    device: torch.device,
    folder: Path,
) -> Any:
    """Opens a channel of a source to the servers that the run's rollout is attached to.

    Args:
        store: Store of the channel, in which source and rollout meet.
        device: Device of the source's weights.
        folder: Folder for the source's files.
    """
    if assignment.rank > 0:
        return GroupRelay.of_channel(store, assignment, timeout_s=timeout_s)
    return ServersSource(
        store, assignment, host=host, timeout_s=timeout_s, device=device, folder=folder
    )
