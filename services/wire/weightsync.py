"""Typed client of a weight member, with which the controller runs weight sessions. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.messages import from_message, to_message
from services.common.rpc.client import call
from services.weightsync.canary import Canary
from services.weightsync.weight_plan import TensorSpec
from slipstream.weightsync.v1 import weightsync_pb2 as pb
from slipstream.weightsync.v1 import weightsync_pb2_grpc

# The peer enforces the deadline itself; the call times out this much later.
_MARGIN_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferResult:
    """Report of a member about a transfer."""

    digests: tuple[str, ...]
    """Digest of each source that took part, in order."""
    num_bytes: int
    """Bytes sent or received."""
    seconds: float
    """Time that the member measured."""
    manifest: str
    """Digest of the manifest that a source wrote to a store; otherwise empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """Description of the weights that a trainer sends."""

    tensors: tuple[TensorSpec, ...]
    """Tensors in sending order."""
    source_addresses: tuple[str, ...]
    """Addresses of the sending ranks in the order of their rows; empty if the described member sends all."""
    device: str
    """Device of the weights: ``cpu``, or ``cuda:`` and the GPU's UUID."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """Answer of a member to a proposed plan."""

    plan_hash: str
    """Hash of the plan that the member built."""
    device: str
    """Device of the member's weights: ``cpu``, or ``cuda:`` and the GPU's UUID."""


class WeightSyncClient:
    """Calls one member of a weight group."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = weightsync_pb2_grpc.WeightSyncServiceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)

    async def alive(self, *, timeout_s: float) -> None:
        """Returns if the member's process answers.

        Raises:
            ServiceError: If it does not.
        """
        await call(self._health.Check, health_pb2.HealthCheckRequest(), timeout_s=timeout_s)

    async def describe(self) -> Described:
        """Requests the trainer's tensors in sending order and the addresses of its sending ranks."""
        request = pb.DescribeWeightsRequest()
        response = await call(self._stub.DescribeWeights, request, idempotent=True)
        return Described(
            tensors=tuple(from_message(spec, TensorSpec) for spec in response.tensors),
            source_addresses=tuple(response.source_addresses),
            device=response.device,
        )

    async def agree_plan(
        self,
        tensors: Sequence[TensorSpec],
        bucket_bytes: int,
        *,
        num_sources: int,
        source: int | None,
        mode: str,
    ) -> Agreed:
        """Proposes a plan to a source, or to a receiver if ``source`` is None."""
        request = pb.AgreePlanRequest(
            tensors=[to_message(spec, pb.TensorSpec) for spec in tensors],
            bucket_bytes=bucket_bytes,
            source_count=num_sources,
            source=-1 if source is None else source,
            mode=mode,
        )
        response = await call(self._stub.AgreePlan, request, idempotent=True)
        return from_message(response, Agreed)

    async def form_group(
        self,
        epoch: int,
        *,
        receiver: int | None,
        num_receivers: int,
        backend: str,
        scope: str,
        timeout_s: float,
        url: str = "",
    ) -> None:
        """Makes a source, or the receiver of that number, join a group."""
        request = pb.FormGroupRequest(
            epoch=epoch,
            receiver=-1 if receiver is None else receiver,
            receiver_count=num_receivers,
            backend=backend,
            scope=scope,
            timeout_s=timeout_s,
            url=url,
        )
        await call(self._stub.FormGroup, request, timeout_s=timeout_s + _MARGIN_S)

    async def prepare(self, epoch: int, version: int, plan_hash: str, *, timeout_s: float) -> int:
        """Prepares the member for a transfer; returns the version that it still holds, or -1."""
        request = pb.PrepareTransferRequest(epoch=epoch, version=version, plan_hash=plan_hash)
        response = await call(self._stub.PrepareTransfer, request, timeout_s=timeout_s)
        return response.held_version

    async def transfer(
        self,
        epoch: int,
        version: int,
        *,
        base_version: int,
        timeout_s: float,
        stored: str = "",
        manifests: Sequence[str] = (),
    ) -> TransferResult:
        """Makes the member send or receive a version, or the changes since ``base_version``.

        Args:
            stored: Name of the version in a store; empty for members that meet.
            manifests: For a receiver, the digest of each source's manifest in the store.
        """
        request = pb.TransferWeightsRequest(
            epoch=epoch,
            version=version,
            timeout_s=timeout_s,
            base_version=base_version,
            stored=stored,
            manifests=manifests,
        )
        response = await call(self._stub.TransferWeights, request, timeout_s=timeout_s + _MARGIN_S)
        return TransferResult(
            digests=tuple(response.digests),
            num_bytes=response.size_bytes,
            seconds=response.duration_s,
            manifest=response.manifest,
        )

    async def retain(self, epoch: int, names: Sequence[str], *, timeout_s: float) -> None:
        """Makes a source delete all versions but some from its store."""
        request = pb.RetainVersionsRequest(epoch=epoch, names=names, timeout_s=timeout_s)
        await call(
            self._stub.RetainVersions, request, timeout_s=timeout_s + _MARGIN_S, idempotent=True
        )

    async def adopt(self, epoch: int, version: int, digest: str, *, timeout_s: float) -> float:
        """Makes the member put a version into service; returns its seconds without a token."""
        request = pb.AdoptWeightsRequest(epoch=epoch, version=version, digest=digest)
        response = await call(
            self._stub.AdoptWeights, request, timeout_s=timeout_s, idempotent=True
        )
        return response.stall_s

    async def score(self, *, timeout_s: float) -> Canary:
        """Makes the trainer score the canary."""
        request = pb.ScoreWeightsRequest()
        response = await call(
            self._stub.ScoreWeights, request, timeout_s=timeout_s, idempotent=True
        )
        return from_message(response, Canary)

    async def check(
        self, version: int, canary: Canary, tolerance: float, *, timeout_s: float
    ) -> float:
        """Makes a rollout score the canary and compare; returns the mean absolute difference."""
        request = pb.CheckWeightsRequest(
            version=version,
            token_ids=canary.token_ids,
            logprobs=canary.logprobs,
            tolerance=tolerance,
        )
        response = await call(
            self._stub.CheckWeights, request, timeout_s=timeout_s, idempotent=True
        )
        return response.difference

    async def abort(self, epoch: int, reason: str, *, timeout_s: float) -> None:
        request = pb.AbortGroupRequest(epoch=epoch, reason=reason)
        await call(self._stub.AbortGroup, request, timeout_s=timeout_s)
