"""From the name of a mode to its two sides, and to the collective backend that it needs."""

from collections.abc import Callable, Mapping

import torch

from services.common.weightsync.endpoints import WeightSink
from services.common.weightsync.modes.base import Receiver, Sender
from services.common.weightsync.modes.cpu_async import HostReceiver, HostSender
from services.common.weightsync.modes.delta import DeltaReceiver, DeltaSender
from services.common.weightsync.modes.inplace import InplaceReceiver
from services.common.weightsync.modes.shadow import ShadowReceiver, ShadowSender
from services.common.weightsync.plan import WeightPlan

_SENDERS: Mapping[str, Callable[[WeightPlan, torch.device, int], Sender]] = {
    "shadow": ShadowSender,
    "inplace": ShadowSender,
    "cpu_async": HostSender,
    "delta": DeltaSender,
}
_RECEIVERS: Mapping[str, Callable[[WeightPlan, torch.device, WeightSink], Receiver]] = {
    "shadow": ShadowReceiver,
    "inplace": InplaceReceiver,
    "cpu_async": HostReceiver,
    "delta": DeltaReceiver,
}


def build_sender(mode: str, plan: WeightPlan, device: torch.device, source: int) -> Sender:
    """The side of one source.

    Raises:
        ValueError: If the mode is unknown.
    """
    return _SENDERS[_known(mode)](plan, device, source)


def build_receiver(mode: str, plan: WeightPlan, device: torch.device, sink: WeightSink) -> Receiver:
    """The side of a rollout.

    Raises:
        ValueError: If the mode is unknown, or the engine cannot do it.
    """
    return _RECEIVERS[_known(mode)](plan, device, sink)


def wire_device(mode: str, device: torch.device) -> torch.device:
    """Where what travels lies."""
    return torch.device("cpu") if mode == "cpu_async" else device


def _known(mode: str) -> str:
    if mode not in _RECEIVERS:
        raise ValueError(
            f"weight_sync.mode must be one of {', '.join(_RECEIVERS)}, but is {mode!r}"
        )
    return mode
