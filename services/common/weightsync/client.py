"""Typed client of a weight member; the controller drives sessions with it. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from services.common.grpc_client import call
from services.common.weightsync.plan import TensorSpec
from slipstream.weightsync.v1 import weightsync_pb2 as pb
from slipstream.weightsync.v1 import weightsync_pb2_grpc

_CONTROL_TIMEOUT_S = 30.0
# The peer enforces the deadline itself; this much later the call is given up.
_MARGIN_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferResult:
    """What a member reported of a transfer."""

    digests: tuple[str, ...]
    """Of each source that took part, in order."""
    num_bytes: int
    """Bytes sent or received."""
    seconds: float
    """The member's own time."""


class WeightSyncClient:
    """Calls one member."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = weightsync_pb2_grpc.WeightSyncServiceStub(channel)

    async def describe(self) -> tuple[TensorSpec, ...]:
        """What the trainer sends, in sending order."""
        response = await call(
            self._stub.DescribeWeights,
            pb.DescribeWeightsRequest(),
            timeout_s=_CONTROL_TIMEOUT_S,
            idempotent=True,
        )
        return tuple(
            TensorSpec(spec.name, tuple(spec.shape), spec.dtype) for spec in response.tensors
        )

    async def agree_plan(
        self,
        tensors: Sequence[TensorSpec],
        bucket_bytes: int,
        *,
        num_sources: int,
        source: int | None,
    ) -> str:
        """Propose a plan to a source, or to a receiver; returns the hash of what the member made of it."""
        response = await call(
            self._stub.AgreePlan,
            pb.AgreePlanRequest(
                tensors=[
                    pb.TensorSpec(name=spec.name, shape=spec.shape, dtype=spec.dtype)
                    for spec in tensors
                ],
                bucket_bytes=bucket_bytes,
                source_count=num_sources,
                source=-1 if source is None else source,
            ),
            timeout_s=_CONTROL_TIMEOUT_S,
            idempotent=True,
        )
        return response.plan_hash

    async def form(
        self,
        epoch: int,
        *,
        receiver: int | None,
        num_receivers: int,
        backend: str,
        scope: str,
        timeout_s: float,
    ) -> None:
        """Have a source, or the receiver of that number, join a group."""
        await call(
            self._stub.FormGroup,
            pb.FormGroupRequest(
                epoch=epoch,
                receiver=-1 if receiver is None else receiver,
                receiver_count=num_receivers,
                backend=backend,
                scope=scope,
                timeout_s=timeout_s,
            ),
            timeout_s=timeout_s + _MARGIN_S,
        )

    async def prepare(self, epoch: int, version: int, plan_hash: str, *, timeout_s: float) -> None:
        """Have the member get ready."""
        await call(
            self._stub.PrepareTransfer,
            pb.PrepareTransferRequest(epoch=epoch, version=version, plan_hash=plan_hash),
            timeout_s=timeout_s,
        )

    async def transfer(self, epoch: int, version: int, timeout_s: float) -> TransferResult:
        """Have the member send or receive a version."""
        response = await call(
            self._stub.TransferWeights,
            pb.TransferWeightsRequest(epoch=epoch, version=version, timeout_s=timeout_s),
            timeout_s=timeout_s + _MARGIN_S,
        )
        return TransferResult(
            digests=tuple(response.digests),
            num_bytes=response.size_bytes,
            seconds=response.duration_s,
        )

    async def adopt(self, epoch: int, version: int, digest: str, *, timeout_s: float) -> float:
        """Have the member serve a version; returns its seconds without a token."""
        response = await call(
            self._stub.AdoptWeights,
            pb.AdoptWeightsRequest(epoch=epoch, version=version, digest=digest),
            timeout_s=timeout_s,
            idempotent=True,
        )
        return response.stall_s

    async def abort(self, epoch: int, reason: str, *, timeout_s: float) -> None:
        """Have the member give up an epoch."""
        await call(
            self._stub.AbortGroup,
            pb.AbortGroupRequest(epoch=epoch, reason=reason),
            timeout_s=timeout_s,
        )
