"""A weight member in a process of its own.

Serves the member's gRPC and tells its port. A receiver tells the digest of its live weights after each
adoption, so that a test can compare it, and falls where a test wants it to.
"""

import asyncio
import hashlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from services.common.rpc.client import open_channel
from services.common.rpc.server import serve
from services.common.telemetry.logging import configure
from services.controller.client import Rendezvous
from services.weightsync import group, shared_buffers
from services.weightsync.canary import Canary
from services.weightsync.endpoints import Place
from services.weightsync.member import WeightMember
from services.weightsync.modes.placing import live_placer
from services.weightsync.plan import TensorSpec, WeightPlan
from services.weightsync.server import WeightSyncServicer
from slipstream.controller.v1 import membership_pb2_grpc
from slipstream.weightsync.v1 import weightsync_pb2_grpc

_LEAST_BUCKET_BYTES = 1 << 16


@dataclass(frozen=True)
class Fall:
    """Where a rollout ends or stops itself."""

    how: signal.Signals
    """``SIGKILL`` or ``SIGSTOP``."""
    bucket: int = 0
    """At the start of that many buckets since its own start; 0 is not in a transfer."""
    version: int = -1
    """In the adoption of that version; -1 is in none."""


@dataclass(frozen=True)
class Options:
    """What a member process is."""

    role: str
    """``trainer`` or ``rollout``."""
    rendezvous: str
    """Where members meet."""
    num_bytes: int
    """Of the weights."""
    device: str
    """Where they lie."""
    fall: Fall | None = None
    """Where it falls."""
    claims: str = ""
    """Device that it says to be on; empty for the one that it is on."""
    is_walled: bool = False
    """Whether it cannot open what other processes lend, as in a container of its own."""
    patience_s: float | None = None
    """Of a collective on a busy machine; a stopped peer holds its buffers for as long. None for the usual."""


class Trainer:
    """Weights that are new at every look, and the same in every process that counts along."""

    def __init__(self, num_bytes: int, device: str) -> None:
        self._device = device
        self._specs = [TensorSpec(f"layer{i}", (num_bytes // 64, 4), "float32") for i in range(4)]
        self._version = -1

    def weight_specs(self) -> list[TensorSpec]:
        return self._specs

    def weight_tensors(self) -> Iterator[tuple[str, Tensor]]:
        self._version += 1
        for spec in self._specs:
            yield spec.name, torch.full(spec.shape, float(self._version), device=self._device)

    def score_canary(self) -> Canary:
        return Canary((1, 2, 3), (-1.0, -2.0))


class Rollout:
    """Tells what it serves."""

    def __init__(
        self, num_bytes: int, device: str, told: Connection, fall: Fall | None = None
    ) -> None:
        self._told = told
        self._fall = fall
        self._live = {
            spec.name: torch.zeros(spec.shape, device=device)
            for spec in Trainer(num_bytes, device).weight_specs()
        }

    async def open_weights(self, plan: WeightPlan, slots: Sequence[Sequence[Tensor]]) -> Place:
        return live_placer(plan, self._live)

    async def adopt_placed(self, version: int) -> float:
        return await self.adopt_weights(version, self._live)

    async def close_weights(self) -> None:
        """Nothing is paused."""

    async def adopt_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        if self._fall is not None and self._fall.version == version:
            os.kill(os.getpid(), self._fall.how)
        digest = await asyncio.to_thread(self._digest, tensors)
        self._told.send_bytes(f"serves {version} {digest[:16]}".encode())
        return 0.0

    def _digest(self, tensors: Mapping[str, Tensor]) -> str:
        total = hashlib.sha256()
        for name in sorted(tensors):
            total.update(tensors[name].cpu().numpy().data)
        return total.hexdigest()

    async def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        return (-1.0, -2.0)

    async def refuse_weights(self, reason: str) -> None:
        self._told.send_bytes(f"refuses {reason}".encode())


def fall_in_transfer(fall: Fall) -> None:
    """Fall once that many buckets were begun."""
    honest, begun = group.Channel.broadcast, 0

    def broadcast(channel: group.Channel, tensor: Tensor) -> group.Work:
        nonlocal begun
        begun += tensor.nbytes >= _LEAST_BUCKET_BYTES
        if begun == fall.bucket:
            os.kill(os.getpid(), fall.how)
        return honest(channel, tensor)

    group.Channel.broadcast = broadcast


def wall(*_: object) -> Tensor:
    """Open nothing."""
    raise OSError("no such process")


def run(options: Options, told: Connection) -> None:
    """Serve until killed."""
    torch.set_num_threads(1)
    configure(member=options.role)
    if options.patience_s is not None:
        group._GLOO_TIMEOUT_S = options.patience_s
    if options.is_walled:
        shared_buffers._open_file = wall
    if options.fall is not None and options.fall.bucket > 0:
        fall_in_transfer(options.fall)
    asyncio.run(main(options, told))


class ClaimingMember(WeightMember):
    """Says to be on another device than it is."""

    claims = ""

    @property
    def device_name(self) -> str:
        return self.claims or super().device_name


async def main(options: Options, told: Connection) -> None:
    weights, is_trainer = (options.num_bytes, options.device), options.role == "trainer"
    async with open_channel(options.rendezvous, "worker") as channel:
        meetings = membership_pb2_grpc.RendezvousServiceStub(channel)
        loop = asyncio.get_running_loop()
        member = ClaimingMember(
            source=Trainer(*weights) if is_trainer else None,
            sink=None if is_trainer else Rollout(*weights, told, options.fall),
            device=torch.device(options.device),
            host="127.0.0.1",
            rendezvous=lambda scope: Rendezvous(meetings, loop, scope),
        )

        member.claims = options.claims

        def register(server):
            weightsync_pb2_grpc.add_WeightSyncServiceServicer_to_server(
                WeightSyncServicer(member), server
            )

        async with serve("127.0.0.1:0", register) as port:
            told.send_bytes(f"port {port}".encode())
            await asyncio.Event().wait()
