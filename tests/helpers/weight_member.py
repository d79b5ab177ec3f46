"""A weight member in a separate process.

The process serves the member's gRPC and reports its port. A receiver reports the digest of its live weights
after each adoption, which tests compare, and fails at the point that a test sets.
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
from services.weightsync import group, shared_buffers
from services.weightsync.canary import Canary
from services.weightsync.endpoints import Place
from services.weightsync.member import WeightMember
from services.weightsync.modes.placing import live_placer
from services.weightsync.server import WeightSyncServicer
from services.weightsync.weight_plan import TensorSpec, WeightPlan
from services.wire.controller import Rendezvous
from slipstream.controller.v1 import membership_pb2_grpc
from slipstream.weightsync.v1 import weightsync_pb2_grpc

_LEAST_BUCKET_BYTES = 1 << 16


@dataclass(frozen=True)
class Fall:
    """Point at which a rollout kills or stops itself."""

    how: signal.Signals
    """``SIGKILL`` or ``SIGSTOP``."""
    bucket: int = 0
    """Number of started buckets, counted from the process's start, at which it fails; 0 disables
    this."""
    version: int = -1
    """Version at whose adoption it fails; -1 disables this."""


@dataclass(frozen=True)
class Options:
    """Options of a member process."""

    role: str
    """``trainer`` or ``rollout``."""
    rendezvous: str
    """Address of the rendezvous."""
    num_bytes: int
    """Bytes of the weights."""
    device: str
    """Device of the weights."""
    fall: Fall | None = None
    """Point at which it fails."""
    claims: str = ""
    """Device that it reports; empty for its real device."""
    is_walled: bool = False
    """True if it cannot open memory that other processes share, as in a separate container."""
    patience_s: float | None = None
    """Timeout of a collective in seconds, for a busy machine; None uses the default. A stopped peer
    blocks the collective's buffers for that long."""


class Trainer:
    """Fake trainer whose weights change with every read, in the same way in all processes."""

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
    """Fake rollout that reports the version and digest of the weights it serves."""

    def __init__(
        self, num_bytes: int, device: str, reports: Connection, fall: Fall | None = None
    ) -> None:
        self._reports = reports
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
        """Does nothing, because nothing is paused."""

    async def adopt_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        if self._fall is not None and self._fall.version == version:
            os.kill(os.getpid(), self._fall.how)
        digest = await asyncio.to_thread(self._digest, tensors)
        self._reports.send_bytes(f"serves {version} {digest[:16]}".encode())
        return 0.0

    def _digest(self, tensors: Mapping[str, Tensor]) -> str:
        total = hashlib.sha256()
        for name in sorted(tensors):
            total.update(tensors[name].cpu().numpy().data)
        return total.hexdigest()

    async def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        return (-1.0, -2.0)

    async def refuse_weights(self, reason: str) -> None:
        self._reports.send_bytes(f"refuses {reason}".encode())


def fall_in_transfer(fall: Fall) -> None:
    """Makes the process fail after a number of started buckets."""
    honest, begun = group.Channel.broadcast, 0

    def broadcast(channel: group.Channel, tensor: Tensor) -> group.Work:
        nonlocal begun
        begun += tensor.nbytes >= _LEAST_BUCKET_BYTES
        if begun == fall.bucket:
            os.kill(os.getpid(), fall.how)
        return honest(channel, tensor)

    group.Channel.broadcast = broadcast


def wall(*_: object) -> Tensor:
    """Raises an error instead of opening shared memory."""
    raise OSError("no such process")


def run(options: Options, reports: Connection) -> None:
    """Serves until the process is killed."""
    configure(member=options.role)
    if options.patience_s is not None:
        group._GLOO_TIMEOUT_S = options.patience_s
    if options.is_walled:
        shared_buffers._open_file = wall
    if options.fall is not None and options.fall.bucket > 0:
        fall_in_transfer(options.fall)
    asyncio.run(main(options, reports))


class ClaimingMember(WeightMember):
    """Weight member that can report another device than its real one."""

    claims = ""

    @property
    def device_name(self) -> str:
        return self.claims or super().device_name


async def main(options: Options, reports: Connection) -> None:
    weights, is_trainer = (options.num_bytes, options.device), options.role == "trainer"
    async with open_channel(options.rendezvous, "worker") as channel:
        meetings = membership_pb2_grpc.RendezvousServiceStub(channel)
        loop = asyncio.get_running_loop()
        member = ClaimingMember(
            source=Trainer(*weights) if is_trainer else None,
            sink=None if is_trainer else Rollout(*weights, reports, options.fall),
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
            reports.send_bytes(f"port {port}".encode())
            await asyncio.Event().wait()
