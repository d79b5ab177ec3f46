"""``shadow``: receives into a second copy during generation; adopts it by one copy between two steps."""

import asyncio
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from services.weightsync.arena import WeightArena
from services.weightsync.endpoints import WeightSink, WeightSource, on_device
from services.weightsync.group import WeightGroup
from services.weightsync.modes.base import Receiver, pack_weights, packed_checksums
from services.weightsync.modes.placing import Placer, whole_buffers
from services.weightsync.modes.staged import Slots, receive_staged
from services.weightsync.transfer import (
    TransferError,
    Transferred,
    TransferRequest,
    receive_version,
    send_version,
)
from services.weightsync.weight_plan import WeightPlan


class ShadowSender:
    """Sends its arena, bucket by bucket."""

    def __init__(self, plan: WeightPlan, device: torch.device, source: int) -> None:
        self.plan = plan
        self.held_version = -1
        self._arena = WeightArena(plan, device, source=source)
        self._packed_version = -1
        self._checksums: Tensor | None = None

    def pack(self, source: WeightSource, version: int) -> None:
        if version != self._packed_version:
            self._packed_version = -1
            pack_weights(source, self._arena)
            self._checksums = packed_checksums(self._arena)
            self._packed_version = version

    def send(self, group: WeightGroup, request: TransferRequest) -> Transferred:
        transferred = send_version(group, self._arena, self._prepared_checksums(request), request)
        self.held_version = request.version
        return transferred

    def _prepared_checksums(self, request: TransferRequest) -> Tensor:
        if self._checksums is None:
            raise TransferError(f"version {request.version} is not prepared here; prepare it first")
        return self._checksums


def shadow_receiver(
    plan: WeightPlan, devices: Sequence[torch.device], sink: WeightSink
) -> Receiver:
    """Chooses a receiver: ``ShadowReceiver`` for one source and one device, else ``MultiSourceReceiver``."""
    is_divided = len(plan.sources) > 1 or len(devices) > 1
    return (MultiSourceReceiver if is_divided else ShadowReceiver)(plan, devices, sink)


class MultiSourceReceiver:
    """Receives rows from several sources directly into the whole tensors of one shadow.

    A source's bucket holds rows of many tensors, so buckets pass through two slots per source. If
    the engine has several GPUs, each of them holds some of the tensors.

    Args:
        slots: Buffers for buckets; None allocates them on the first device.
    """

    def __init__(
        self,
        plan: WeightPlan,
        devices: Sequence[torch.device],
        sink: WeightSink,
        slots: Slots | None = None,
    ) -> None:
        self.plan = plan
        self.held_version = -1
        self._sink = sink
        self._slots = slots or Slots(plan, devices[0])
        flat, self._tensors = whole_buffers(plan, devices)
        self._placer = Placer(plan, flat)

    async def prepare(self) -> None:
        """Does nothing: the shadow is always ready."""

    def receive(self, group: WeightGroup, request: TransferRequest) -> Transferred:
        return receive_staged(group, self._slots, request, self._placer)

    async def adopt(self, version: int) -> float:
        """Copies the shadow into the live weights."""
        return await self._sink.adopt_weights(version, self._tensors)

    async def give_up(self) -> None:
        """Replaces the slots: aborted collectives may still write into the old ones."""
        self._slots = self._slots.renewed()


class ShadowReceiver:
    """Receives into a shadow on the engine's device."""

    def __init__(self, plan: WeightPlan, devices: Sequence[torch.device], sink: WeightSink) -> None:
        device = devices[0]
        self.plan = plan
        self.held_version = -1
        self._sink = sink
        self._shadow = WeightArena(plan, device)
        self._sums = self._shadow.no_checksums()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    async def prepare(self) -> None:
        """Does nothing: the shadow is always ready."""

    def receive(self, group: WeightGroup, request: TransferRequest) -> Transferred:
        if request.base_version not in (-1, self.held_version):
            raise TransferError(
                f"expected a delta from version {self.held_version}, got one from {request.base_version}"
            )
        # Until it is verified, the shadow holds no version.
        self.held_version = -1
        shadow = self._shadow
        transferred = self._receive(group, shadow, request)
        if shadow is self._shadow:
            self.held_version = request.version
        return transferred

    def send(self, group: WeightGroup, request: TransferRequest) -> Transferred:
        if request.version != self.held_version:
            raise TransferError(
                f"cannot send version {request.version} to a peer: this member has {self.held_version}"
            )
        (source,) = self._shadow.buffers
        return send_version(group, self._shadow, self._shadow.checksums(source), request)

    async def adopt(self, version: int) -> float:
        """Copies the shadow into the live weights."""
        return await self._sink.adopt_weights(version, await asyncio.to_thread(self._tensors))

    async def give_up(self) -> None:
        """Drops the held version; replaces a CPU shadow, as aborted Gloo work may still write into it."""
        self.held_version = -1
        if self._shadow.device.type == "cpu":
            self._shadow = WeightArena(self.plan, self._shadow.device)
            self._sums = self._shadow.no_checksums()

    def _tensors(self) -> Mapping[str, Tensor]:
        """Returns the shadow's tensors by name; copies of divided tensors run concurrently with decoding."""
        with on_device(self._shadow.device), torch.cuda.stream(self._stream):
            tensors = self._shadow.whole_tensors()
            if self._stream is not None:
                self._stream.synchronize()
        return tensors

    def _receive(
        self, group: WeightGroup, shadow: WeightArena, request: TransferRequest
    ) -> Transferred:
        return receive_version(group, shadow, request, self._sums)
